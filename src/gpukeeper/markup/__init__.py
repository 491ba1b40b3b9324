"""Pages and pictures that need no server: elements of HTML and SVG, their style, what all charts share. Pure."""

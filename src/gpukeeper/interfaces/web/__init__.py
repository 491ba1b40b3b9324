"""The dashboard: pages, live updates and the HTTP API. Shows values of `views`, asks a source, never acts itself."""

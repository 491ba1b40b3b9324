"""Jobs of a Ray cluster, over its Jobs API: what acceptance runs and passes on nodes share. Ray is not needed here."""

"""From replies of probes to findings and verdicts. Pure: the same input gives the same findings."""

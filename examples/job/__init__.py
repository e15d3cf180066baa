"""Parts of whole_job.py: its clicks, model, versions, server and plots."""

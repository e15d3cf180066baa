"""The parts of whole_job.py: its clicks, its model, its versions, its server and its pictures."""

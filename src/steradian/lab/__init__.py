"""The lab: data, models and trainings to see the theory at work."""

"""Data for the lab: images and labels from any source, packed into few files, resident on the device for training."""

from steradian.lab.data.resident import Resident
from steradian.lab.data.sources import DataSet, Images, Split, digits, load, pack

__all__ = ["DataSet", "Images", "Resident", "Split", "digits", "load", "pack"]

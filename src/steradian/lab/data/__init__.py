"""Data for the lab: images and labels from any source, packed into few files, resident on the device for training."""

from steradian.lab.data.images import DataSet, Images
from steradian.lab.data.packed import pack
from steradian.lab.data.resident import Resident, epoch_plan
from steradian.lab.data.sources import Split, digits, load, usual_root

__all__ = ["DataSet", "Images", "Resident", "Split", "digits", "epoch_plan", "load", "pack", "usual_root"]

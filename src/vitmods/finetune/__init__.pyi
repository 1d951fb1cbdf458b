from .delta import load_delta as load_delta
from .delta import save_delta as save_delta
from .freeze import Trained as Trained
from .freeze import train_only as train_only
from .freeze import what_is_trained as what_is_trained
from .multitask import MultiTask as MultiTask
from .roles import ROLES as ROLES
from .roles import parameter_roles as parameter_roles

from .delta import MultiTask as MultiTask
from .delta import load_delta as load_delta
from .delta import save_delta as save_delta
from .roles import ROLES as ROLES
from .roles import Trained as Trained
from .roles import parameter_roles as parameter_roles
from .roles import train_only as train_only
from .roles import what_is_trained as what_is_trained

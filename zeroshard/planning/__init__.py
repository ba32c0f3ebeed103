"""Planning before a run: `plan` (memory, messages, files), `fit` (which configurations fit), a dry run, and a
simulated fabric (how much communication is exposed)."""

from zeroshard.planning.activations import Trace as Trace
from zeroshard.planning.activations import Workload as Workload
from zeroshard.planning.configuration import Configuration as Configuration
from zeroshard.planning.dry_run import dry_run as dry_run
from zeroshard.planning.fabric import simulated_fabric as simulated_fabric
from zeroshard.planning.fit import Candidate as Candidate
from zeroshard.planning.fit import cheapest_first as cheapest_first
from zeroshard.planning.fit import fit as fit
from zeroshard.planning.forecast import Forecast as Forecast
from zeroshard.planning.forecast import Phase as Phase
from zeroshard.planning.forecasting import plan as plan
from zeroshard.planning.hints import Hint as Hint
from zeroshard.planning.moments import Moment as Moment
from zeroshard.planning.time_model import MACHINES as MACHINES
from zeroshard.planning.time_model import Machine as Machine
from zeroshard.planning.time_model import Span as Span
from zeroshard.planning.time_model import StepTime as StepTime
from zeroshard.planning.wire import Fabric as Fabric
from zeroshard.planning.wire import Network as Network
from zeroshard.planning.wire import ProcessorClock as ProcessorClock
from zeroshard.planning.wire import Transfer as Transfer
from zeroshard.planning.wire import WallClock as WallClock

"""What a run will hold, send and write, before it starts: `plan`, and which of many configurations fit."""

from zeroshard.planning.fit import Candidate as Candidate
from zeroshard.planning.fit import fit as fit
from zeroshard.planning.forecast import Configuration as Configuration
from zeroshard.planning.forecast import Forecast as Forecast
from zeroshard.planning.forecast import Phase as Phase
from zeroshard.planning.forecast import plan as plan

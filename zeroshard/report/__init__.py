"""The page of a plan or run: `Facts` are collected from the planner, and `page` draws them as one HTML file."""

from zeroshard.report.facts import Facts as Facts
from zeroshard.report.facts import Planned as Planned
from zeroshard.report.facts import facts_of as facts_of
from zeroshard.report.page import PAGE as PAGE
from zeroshard.report.page import Report as Report
from zeroshard.report.plan_file import read_plan as read_plan
from zeroshard.report.plan_file import write_plan as write_plan
from zeroshard.report.run_folder import RunRecord as RunRecord
from zeroshard.report.run_folder import read_run as read_run

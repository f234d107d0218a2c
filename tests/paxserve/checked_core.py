"""The real engine core, with its invariants asserted after every step, that says what it has done."""

import json
from collections import Counter

from paxserve.engine.engine_core import EngineCore
from paxserve.engine.model_runner import Launched
from paxserve.messages import StepOutputs

SAYS_EVERY = 500
"""Steps between two lines about what it has done."""


class CheckedCore(EngineCore):
    """An engine core that fails the moment its books are wrong."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.counts: Counter[str] = Counter()
        self._launch, self.runner.launch = self.runner.launch, self._counted

    def step(self) -> StepOutputs:
        """One step, then the check."""
        outputs = super().step()
        self.check_integrity()
        return outputs

    def _counted(self, step) -> Launched:
        counts = self.counts
        counts["steps"] += 1
        counts["several steps"] += step.count > 1
        counts["saved"] += len(step.page_saves)
        counts["from host"] += len(step.page_loads)
        counts["from disk"] += len(step.page_fills)
        if counts["steps"] % SAYS_EVERY == 0:
            self._say()
        return self._launch(step)

    def _say(self) -> None:
        disk = self.scheduler.pool.disk
        if disk is not None:
            folder = disk.folder
            assert folder.num_bytes <= folder.max_bytes
            self.counts["damaged"] = folder.num_damaged
        print(f"core counts: {json.dumps(self.counts)}", flush=True)

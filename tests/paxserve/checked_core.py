"""The real engine core, with its invariants asserted after every step."""

from paxserve.engine.engine_core import EngineCore
from paxserve.messages import EngineOutput


class CheckedCore(EngineCore):
    """An engine core that fails the moment its books are wrong."""

    def step(self) -> list[EngineOutput]:
        """One step, then the check."""
        outputs = super().step()
        self.check_integrity()
        return outputs

"""An engine core that takes a minute to start: for what can happen before a server is ready."""

import time

from paxserve.config import EngineConfig
from tests.paxserve.fake_core import FakeCore


class SlowCore(FakeCore):
    """A scripted core that loads for a long time."""

    def __init__(self, config: EngineConfig) -> None:
        time.sleep(60)
        super().__init__(config)

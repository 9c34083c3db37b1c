"""benchmarks/ is not installed; its folder comes last on the path, so that an installed flashq still wins."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

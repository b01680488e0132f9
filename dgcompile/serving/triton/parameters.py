"""The parameters in config.pbtxt: which bundle the model runs, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from dgcompile.config_file import validation_error
from dgcompile.errors import RequestError

FOREIGN = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"})
"""The python backend's own parameters."""


class Parameters(BaseModel):
    """What ``dgcompile triton`` writes, read back from strings.

    Attributes:
        bundle: folder, absolute or relative to the model's version folder.
        bundle_elsewhere: the path is the server's, and means nothing on the machine that wrote the repository.
        rows, queue_limit, threads: as :meth:`dgcompile.serving.service.Service.open` takes them; None for its defaults.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bundle: Annotated[str, StringConstraints(min_length=1)]
    bundle_elsewhere: bool = False
    rows: Annotated[int, Field(ge=1)] | None = None
    queue_limit: Annotated[int, Field(ge=0)] | None = None
    threads: Annotated[int, Field(ge=1)] | None = None

    @classmethod
    def from_config(cls, values: Mapping[str, str]) -> Parameters:
        """Reads the parameters.

        Raises:
            RequestError: one is missing, unknown or malformed; names it.
        """
        known = {name: value for name, value in values.items() if name not in FOREIGN}
        try:
            return cls.model_validate(known)
        except ValidationError as problem:
            raise validation_error("config.pbtxt, parameters", problem, cls, error=RequestError) from problem

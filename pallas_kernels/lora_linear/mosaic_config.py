"""Block sizes of the Mosaic kernels: measured choices of base products, and the rule for other shapes."""

import dataclasses

from pallas_kernels.gpu import HOPPER_SHARED_BYTES

MAX_TOKENS = 64  # rows of one warpgroup's wgmma: one tile of tokens
MIN_K = 16  # input features, or rank rows, of one wgmma
MAX_COLUMNS = 128
_NUM_SMS = 132


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """Block sizes of both launches.

    Attributes:
      columns: output features of one CTA (of each half, with SwiGLU); divides every projection's width.
      depth: input features of one step of the site kernel's ring. `splits * depth` divides the input features.
      buffers: steps whose tiles are in flight or in use.
      splits: CTAs that share the input features of one block of columns: partial sums of the output.
      shrink_splits: CTAs that share the input features of one block of rank rows; v keeps their shares side by side,
        `depth` columns a block, and the site kernel's tail adds them up.
      shrink_depth: input features of one step of the shrink kernel's ring.
      shrink_buffers: its steps in flight or in use.
    """

    columns: int
    depth: int
    buffers: int
    splits: int
    shrink_splits: int
    shrink_depth: int
    shrink_buffers: int

    @property
    def block_rows(self) -> int:
        """Rank rows of a shrink CTA, and of one step of the tail: the shares of v then fill an x tile."""
        return self.depth // self.shrink_splits

    def num_blocks(self, num_rows: int) -> int:
        """Blocks that hold the rank rows of one projection."""
        return -(-num_rows // self.block_rows)


@dataclasses.dataclass(frozen=True)
class MosaicProblem:
    """What a configuration is picked by. Not the number of tokens: a tile has 64 rows, whatever they hold.

    Attributes:
      in_features: of the group.
      widths: out_features of its projections.
      is_swiglu: gate and up in one CTA.
    """

    in_features: int
    widths: tuple[int, ...]
    is_swiglu: bool

    def site_bytes(self, config: MosaicConfig) -> int:
        """Shared memory of a CTA of the site kernel, with room for its barriers and alignment."""
        halves = 2 if self.is_swiglu else 1
        ring = config.buffers * config.depth * (MAX_TOKENS + halves * config.columns) * 2
        return ring + MAX_TOKENS * config.columns * (2 if config.splits == 1 else 4) + 2048

    def shrink_bytes(self, config: MosaicConfig) -> int:
        """Shared memory of a CTA of the shrink kernel: ring, weights by slot and by row, v."""
        ring = config.shrink_buffers * config.shrink_depth * (MAX_TOKENS + config.block_rows) * 2
        return ring + MAX_TOKENS * config.block_rows * (4 + 4 + 2) + 2048


def pick_config(problem: MosaicProblem) -> MosaicConfig:
    """The measured choice for one problem, or the rule's.

    Raises:
      NotImplementedError: If the kernels do not support the shapes.
    """
    config = _measured(problem) or _by_rule(problem)
    check_supported(problem, config)
    return config


def check_supported(problem: MosaicProblem, config: MosaicConfig) -> None:
    """Raises NotImplementedError for what the kernels do not support."""
    p, c = problem, config
    for name, share in [("splits * depth", c.splits * c.depth), ("shrinks", c.shrink_splits * c.shrink_depth)]:
        if p.in_features % share:
            raise NotImplementedError(
                f"in_features {p.in_features} is not supported; it must be a multiple of {share} ({name} of {c})"
            )
    for width in p.widths:
        if width % c.columns:
            raise NotImplementedError(f"width {width} is not supported; it must be a multiple of {c.columns} columns")
    if c.block_rows % MIN_K or c.depth % c.shrink_splits:
        raise NotImplementedError(
            f"{c} has blocks of {c.depth / c.shrink_splits} rank rows; take a multiple of {MIN_K}"
        )
    if p.is_swiglu and c.splits != 1:
        raise NotImplementedError(f"SwiGLU needs whole sums, but the configuration has {c.splits} splits")
    used = max(p.site_bytes(c), p.shrink_bytes(c))
    if used > HOPPER_SHARED_BYTES:
        raise NotImplementedError(f"{c} needs {used} bytes of shared memory; a CTA has {HOPPER_SHARED_BYTES}")


def _measured(problem: MosaicProblem) -> MosaicConfig | None:
    """The base products of the 8B shape, measured at 32 tokens on an H200 (the shrink fields are the rule's)."""
    match problem.in_features, problem.widths:
        case 4096, (4096, 1024, 1024):
            columns, depth, buffers, splits = 64, 128, 3, 2
        case 4096, (4096,):
            columns, depth, buffers, splits = 128, 64, 4, 4
        case 14336, (4096,):
            columns, depth, buffers, splits = 128, 64, 4, 4
        case 4096, (14336, 14336) if problem.is_swiglu:
            columns, depth, buffers, splits = 64, 64, 3, 1
        case _:
            return None
    return _with_shrink(problem, columns, depth, buffers, splits)


def _by_rule(problem: MosaicProblem) -> MosaicConfig:
    p = problem
    columns = min(64 if p.is_swiglu else MAX_COLUMNS, *(_power_of_two_factor(width) for width in p.widths))
    depth = min(64, _power_of_two_factor(p.in_features))
    for name, size in [("in_features", depth), ("every width", columns)]:
        if size < MIN_K:
            raise NotImplementedError(
                f"in_features {p.in_features} and widths {p.widths} are not supported; {name} must be a multiple of "
                f"{MIN_K}"
            )
    out_features = p.widths[0] if p.is_swiglu else sum(p.widths)
    splits = 1
    while (
        not p.is_swiglu
        and out_features // columns * splits * 2 <= _NUM_SMS
        and p.in_features % (splits * 2 * depth) == 0
        and p.in_features // (splits * 2) >= 512
    ):
        splits *= 2
    return _with_shrink(p, columns, depth, 4, splits)


def _with_shrink(problem: MosaicProblem, columns: int, depth: int, buffers: int, splits: int) -> MosaicConfig:
    # Blocks of 32 rank rows where a share is then no longer than 4096 input features: fewer rows starve the tail's
    # loads, and each share is one more product in it.
    shrink_splits = max(depth // 32, 1)
    if problem.in_features // shrink_splits > 4096:
        shrink_splits = min(shrink_splits * 2, depth // MIN_K)
    return MosaicConfig(
        columns=columns,
        depth=depth,
        buffers=buffers,
        splits=splits,
        shrink_splits=shrink_splits,
        shrink_depth=min(128, _power_of_two_factor(problem.in_features // shrink_splits)),
        shrink_buffers=3,  # leaves room beside it for a CTA of the site kernel, which then fetches weights early
    )


def _power_of_two_factor(n: int) -> int:
    return n & -n

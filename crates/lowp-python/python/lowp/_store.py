"""The buffers of a quantized matrix, which tensors share, and how rows are cut out of them."""

import functools
import weakref

import torch

from . import _compile, _cut, _lowp
from ._errors import LowpError, UnsupportedOp
from ._memory import device_of, dtype_name, memory

#: Decodes of one store that stay planned: by orientation, where FSDP2 gathered its codes to and where the values lie.
_DECODES = 16
#: What masters may be stored as.
MASTER_DTYPES = (torch.float32, torch.bfloat16)
with_columnwise = None  # set by _fsdp.py, which uses this file


class Store:
    """A recipe, a shape and buffers by name, each a tensor of bytes. ``master`` has the values that they were made of, until an
    optimizer takes it."""

    def __init__(self, recipe, rows, cols, buffers, device, master=None):
        self.recipe, self.rows, self.cols = recipe, rows, cols
        self.buffers, self.device, self.master = buffers, device, master
        self.shard = None  # the rows as Rust gathers and updates them
        self.gathers = None  # their gathers by FSDP2
        self.origin = None  # the store that this is a copy of on another device, held weakly
        self.full = None  # what FSDP2 gathered: Gathered
        self.source = None  # what FSDP2 gathered for one phase, that this is a copy of
        self.blank = False  # zeros that FSDP2 copies a shard into
        self.is_part = False  # whether other ranks have other rows
        self.token = self.number = None  # its number in compiled graphs, as a tensor and as it is
        self.described = False  # whether native code knows its layer
        self.products = None  # whether its codes are multiplied, once that was asked
        self.contexts = {}  # what they take for constant, by dtype and whether the tensor is flat
        self.unpadded = None  # the store without padding, where DTensor padded the number of rows
        self.views = {}  # its codes and their scale as products take them, by orientation
        self.held = False  # whether Rust holds the memory of the buffers
        self.usage = None  # the directions that it was made for, where buffers of several may be the same
        self.amax = None  # of the values that the codes were made of, where a file says it and no buffer does; a step makes it unknown
        self.decodes = None  # of its codes, planned for addresses that come again; they end with it
        self.uncast = None  # values that were written and are cast where ranks meet: the master, where there is one
        self.saved_scale = None  # the delayed scale of an optimizer's state, for values that are its master
        self.holder = None  # the optimizer that has the master in its state, held weakly
        self.loose = None  # rows that were loaded without a master, which that optimizer may yet load
        self.cut = None  # of rows that begin or end within blocks: the first one, and how many the whole has, whose scales they have
        self._prefixes = {}
        self._stale = None  # rows whose codes are of another scale, while a checkpoint comes part by part
        self._window = None  # the store and the rows that it was cut out of

    @classmethod
    def empty(cls, recipe, rows, cols, device, usage="both", stored=False, zeros=False, cut=None):
        """Buffers without content, or of zeros."""
        make = torch.zeros if zeros else torch.empty
        specs = recipe.buffers(rows, cols, usage, stored, None if cut is None else cut[1])
        buffers = {spec.name: make(spec.bytes, dtype=torch.uint8, device=device) for spec in specs}
        made = cls(recipe, rows, cols, buffers, device)
        made.usage, made.cut = usage, cut
        return made

    @classmethod
    def of(cls, recipe, shape, buffers, master=None, cut=None):
        """A store over buffers that come from outside, such as a file: those of one usage, or what a shard stores, each whole in
        memory of its own."""
        rows, cols = shape
        recipe.check(rows, cols)
        what = f"{recipe.name} {rows}x{cols}"
        kinds = [(usage, stored) for usage in ("both", "rowwise", "columnwise") for stored in (False, True)]
        if cut is not None:
            start, of = cut
            if not 0 <= start <= start + rows <= of:
                raise LowpError(f"{what} from row {start} on of {of} rows; give rows within those")
            kinds = [("both", True, of)]
        expected = [{spec.name: spec.bytes for spec in recipe.buffers(rows, cols, *kind)} for kind in kinds]
        names = sorted(buffers)
        found = next((of for of in expected if sorted(of) == names), None)
        if found is None:
            raise LowpError(f"{what} has the buffers {', '.join(names) or 'none'}; give {', '.join(expected[0])}")
        for name, buffer in buffers.items():
            _check_memory(f"{name} of {what}", buffer, torch.uint8, (found[name],))
        devices = {buffer.device for buffer in buffers.values()}
        if master is not None:
            dtype = getattr(master, "dtype", None)
            _check_memory(f"the master of {what}", master, dtype if dtype in MASTER_DTYPES else torch.float32, (rows, cols))
            devices.add(master.device)
        if len(devices) != 1:
            raise LowpError(f"{what} on {', '.join(sorted(map(str, devices)))}; move its buffers and its master to one device")
        made = cls(recipe, rows, cols, dict(buffers), devices.pop(), master)
        made.cut = cut
        return made

    @property
    def shape(self):
        return (self.rows, self.cols)

    @property
    def bytes(self):
        return 0 if self.device.type == "meta" else sum(buffer.numel() for buffer in self.buffers.values())

    def named(self, keep=False):
        """The buffers as Rust takes them."""
        if self.cut is not None:
            raise UnsupportedOp(f"{_cut.title(self)}; lowp.AdamW updates such rows only where fully_shard cut them: give it the whole tensor")
        return self._named(keep)

    def _named(self, keep):
        self.check_whole()
        self.held = self.held or keep
        return [(name, memory(buffer, keep)) for name, buffer in self.buffers.items()]

    def as_shard(self, full, world, rank):
        """The rows as Rust gathers and updates them: those of ``rank``, as FSDP2 cuts them."""
        self.check_whole()
        if self.shard is None:
            _cut.check_shard(self, full[0], world, rank)
            self.shard = _lowp.Shard(device_of(self.device), self.recipe, full, world, rank, self._named(keep=True))
        return self.shard

    def specs(self, stored=False):
        """What is known of the buffers, by name."""
        specs = self.recipe.buffers(self.rows, self.cols, "both", stored, None if self.cut is None else self.cut[1])
        return {spec.name: spec for spec in specs}

    def slice(self, start, end):
        """Rows ``start`` to ``end``, with the buffers that a shard stores; those whose rows come first are views. Within blocks they have the
        scales of all rows."""
        end = min(end, self.rows)
        start = min(start, end)
        if (start, end) == (0, self.rows):
            return self
        if self.unpadded is not None and (start, end) == (0, self.unpadded.rows):
            return self.unpadded
        if start == 0 and self.blank:
            return self.prefix(end)
        if self.cut is None and _cut.is_within_blocks(self.recipe, start, end, self.rows):
            return self.slice_within_blocks(start, end)
        buffers = {}
        for name, (cut, shared) in self._cuts(start, end).items():
            # One number or line that all rows share: each has its own copy, as casts write it.
            buffers[name] = cut.clone().reshape(-1) if shared else cut.reshape(-1).contiguous()
        return self._window_of(start, end, buffers, None if self.cut is None else (self.cut[0] + start, self.cut[1]))

    def slice_within_blocks(self, start, end):
        """Rows ``start`` to ``end`` of a whole matrix, in the order of rows, with the scales of all rows."""
        try:
            self.recipe.check_cut_blocks()
        except LowpError as error:
            quantum = self.recipe.row_quantum
            raise LowpError(
                f"rows {start} to {end} of {self.rows}: {self.recipe.name} can only be cut at multiples of {quantum} rows ({error}); choose such rows, or "
                "pad the matrix"
            ) from None
        return self._window_of(start, end, _cut.rows_of(self, start, end), (start, self.rows))

    def rows_for(self, other, start, end):
        """Rows that ``other`` takes a copy of."""
        return self.slice(start, end) if other.cut is None else self.slice_within_blocks(start, end)

    def _window_of(self, start, end, buffers, cut):
        master = None if self.master is None else self.master[start:end]
        window = Store(self.recipe, end - start, self.cols, buffers, self.device, master)
        window._window, window.amax, window.cut = (self, start, end), self.amax, cut
        window.uncast = None if self.uncast is None else self.uncast[start:end]
        return window

    def _cuts(self, start, end):
        """The parts of the buffers that hold rows ``start`` to ``end``, as views, and whether all rows share them."""
        self.derive()
        cuts = {}
        for name, spec in self.specs(stored=True).items():
            if name not in self.buffers:
                raise UnsupportedOp(f"rows cannot be taken from a tensor without {name}; quantize it for both directions (usage='both')")
            buffer, row_bytes = self.buffers[name], spec.row_bytes
            if spec.entry_rows == 0:
                cuts[name] = (buffer, True)
                continue
            first = start // spec.entry_rows
            last = max(first, -(-end // spec.entry_rows)) if start < end else first
            if spec.rows_first:
                cuts[name] = (buffer[first * row_bytes : last * row_bytes], False)
            else:
                table = buffer.view(-1, row_bytes) if row_bytes else buffer.view(0, 0)
                cuts[name] = (table[:, first * spec.entry_bits // 8 : -(-last * spec.entry_bits // 8)], False)
        return cuts

    def prefix(self, rows):
        """The first rows of a destination, such as the padded shard of FSDP2: the same store each time, which ``copy_`` fills."""
        if rows == self.rows:
            return self
        if rows not in self._prefixes:
            self._prefixes[rows] = self.blank_like(rows, self.cut is not None)
        return self._prefixes[rows]

    def blank_like(self, rows, within_blocks=None, device=None):
        """Zeros for so many rows, with what all rows share: a rank without rows gets no copy of it."""
        device = self.device if device is None else torch.empty(0, device=device).device
        of = self.rows if self.cut is None else self.cut[1]
        if within_blocks is None:
            within_blocks = rows <= of if self.cut is not None else _cut.of_chunks(self.recipe, of, rows)
        # Some rows, until a copy says which.
        cut = (0 if rows else of, of) if within_blocks else None
        store = Store.empty(self.recipe, rows, self.cols, device, stored=True, zeros=True, cut=cut)
        store.blank, store.is_part = True, self.is_part or rows != self.rows
        for name, spec in store.specs(stored=True).items():
            shared = _cut.whole_of(self, name) if spec.entry_rows == 0 else None
            if shared is not None:
                store.buffers[name].copy_(shared)
        return store

    def copy_(self, other):
        """Takes the content of another store of the same recipe and shape."""
        if self.shape != other.shape or not (self.recipe == other.recipe or self.recipe.has_weights_of(other.recipe)):
            raise LowpError(
                f"a copy of {other.recipe!r} {other.rows}x{other.cols} into {self.recipe!r} {self.rows}x{self.cols}; dequantize and "
                "quantize again to change either"
            )
        if self._window is not None:
            other.check_cast()
        self.derive()
        other.derive()
        if self.cut != other.cut:
            other = self._follow_cut(other)
        missing = self.buffers.keys() - other.buffers.keys()
        buffers = with_columnwise(other) if missing and other.leaves_out_columnwise else other.buffers
        for name in self.buffers.keys() - buffers.keys():
            raise UnsupportedOp(f"the destination of a copy has no {name}; make it with the same buffers as the source (torch.empty_like)")
        self._check_window()
        self.begin_write()
        self.blank, self.source = False, other.gathered_source
        self.amax = other.amax
        self._stale = None if other._stale is None else other._stale.clone()
        for name, buffer in self.buffers.items():
            buffer.copy_(buffers[name])
        master = other.known_master()
        if master is None and other.uncast is None:
            self.follow_codes()
        else:
            self._mark_loose(False)
            if self.master is None:
                self.master = None if master is None else master.clone()
            elif self.master is not master:
                self.master.copy_(other.uncast if master is None else master)
        if other.uncast is not None:
            self.uncast = other.uncast.clone() if self.master is None else self.master
        if self._window is not None:
            self._write_back()

    def _follow_cut(self, other):
        """Rows that are about to be copied, in the layout of this one. What FSDP2 is about to shard takes theirs."""
        if not self.blank or self.held:
            found = _cut.cut_like(other, self)
            if found is None:
                raise LowpError(f"a copy of {_cut.title(other)} into {_cut.title(self)}; copy rows that were cut where these were, or {_cut.LOAD}")
            return found
        self.cut = other.cut
        self.buffers = Store.empty(self.recipe, self.rows, self.cols, self.device, stored=True, cut=self.cut).buffers
        return other

    @property
    def kept_master(self):
        """The master that ``lowp.quantize`` would keep for other values of these rows."""
        return {"keep_master": False} if self.master is None else {"keep_master": True, "master_dtype": self.master.dtype}

    def follow_codes(self):
        """The values of the codes become the master, where there is one: an optimizer would cast the old one over the codes. What an optimizer
        has in its state waits for its next step: a checkpoint may bring the master, too, before the codes or after them."""
        if self.master is None or self._stale is not None or self.device.type == "meta":
            return
        if self._whole()[0].is_held:
            self._mark_loose(True)
        else:
            self.master.copy_(self.decode_any())

    def hold(self, master, optimizer):
        """An optimizer has the master in its state, and knows its values."""
        self.master, self.holder, self.loose = master, weakref.ref(optimizer), None

    def leave_master(self, master):
        """Keeps the values of a master that an optimizer takes for another store."""
        if self.master is master:
            known = self.known_master()
            self.master, self.holder, self.loose = known.clone() if known is master else known, None, None
            self.uncast = self.master if self.uncast is master else self.uncast

    @property
    def is_held(self):
        """Whether an optimizer has the master in its state."""
        return self.holder is not None and self.holder() is not None

    def known_master(self):
        """The master, with the values of rows that were loaded without it."""
        whole, start, end = self._whole()
        if self.master is None or whole.loose is None:
            return self.master
        return torch.where(whole.loose[start:end].to(self.device)[:, None], self.decode_any(self.master.dtype), self.master)

    def settle_master(self):
        """Before a step: nobody brought the master of rows that were loaded without it."""
        if self.loose is not None:
            self.master.copy_(self.known_master())
            self.loose = None

    def _mark_loose(self, loose):
        whole, start, end = self._whole()
        if whole.loose is None and loose:
            whole.loose = torch.zeros(whole.rows, dtype=torch.bool)
        if whole.loose is not None:
            whole.loose[start:end] = loose
            whole.loose = whole.loose if whole.loose.any() else None

    def _whole(self):
        """The store that these rows were cut out of, and which they are."""
        whole, start, end = self, 0, self.rows
        while whole._window is not None:
            whole, first, _ = whole._window
            start, end = start + first, end + first
        return whole, start, end

    def known_amax(self):
        """The amax of the values that the codes were made of. After a step it is that of the master, where the scale follows from it: a delayed
        scale, and that of rows that were cut out, follow from other values. ``None`` where nobody knows it."""
        if self.amax is not None or self.master is None:
            return self.amax
        amax = self.master.abs().max().float() if self.master.numel() else torch.tensor(0.0)
        trial = Store.empty(self.recipe, 1, 1, torch.device("cpu"))
        trial.quantize_(amax.cpu().reshape(1, 1), "float32")
        return amax if torch.equal(trial._decode_scale(), self._decode_scale()) else None

    def decode_any(self, dtype=torch.float32):
        """Values of the rowwise codes, or of the columnwise ones where there are no others."""
        return self.decode("rowwise" if self.serves("rowwise") else "columnwise", dtype)

    def begin_rewrite(self):
        """Before all buffers are written by other means."""
        self.begin_write()
        self.blank, self._stale = False, None

    def _check_window(self):
        """Raises where rows that were cut out cannot be written back, before they are written."""
        if self._window is None:
            return
        whole, start, end = self._window
        transposed = [name for name, spec in whole.specs().items() if spec.is_transpose and name in whole.buffers]
        if transposed:
            raise UnsupportedOp(
                f"rows {start} to {end} cannot be written, since the tensor holds {', '.join(transposed)}, a transpose of all rows; copy into the "
                "whole tensor"
            )

    def _write_back(self):
        """Brings rows that were written to the tensor that they were cut out of."""
        whole, start, end = self._window
        is_part, uncast = whole._stale is not None, whole.uncast is not None
        whole.begin_write()
        within_blocks = whole.cut is None and self.cut is not None
        if uncast:
            whole._stale = torch.ones(whole.rows, dtype=torch.bool)
        cuts = _cut.parts_of(whole, self, start, end) if within_blocks else whole._cuts(start, end)
        for name, (cut, shared) in cuts.items():
            if shared and not torch.equal(cut, self.buffers[name]):
                # A checkpoint that other ranks saved comes in parts: the other rows must follow.
                if is_part:
                    raise LowpError(
                        f"rows {start} to {end} of {whole.rows} have another {name} than the rows that were copied before; copy all rows from one "
                        "tensor"
                    )
                whole._stale = torch.ones(whole.rows, dtype=torch.bool)
                cut.copy_(self.buffers[name])
            if cut is None:
                _cut.write_columns(whole, name, start, self.buffers[name])
            elif not shared:
                cut.copy_(self.buffers[name].view(cut.shape))
        if whole._stale is not None:
            whole._stale[start:end] = False
            if not whole._stale.any():
                whole._stale = None

    def begin_write(self):
        self.amax = self.saved_scale = self.source = self.uncast = None
        if self.token is not None:
            torch.autograd.graph.increment_version(self.token)  # graphs save it in the place of the weight
        if self.shard is not None:
            self.shard.begin_write()

    def keep_uncast(self, values):
        """Takes values that are cast later."""
        self.begin_rewrite()
        self._mark_loose(False)
        if self.master is None:
            self.uncast = values.clone()
        else:
            self.master.copy_(values)
            self.uncast = self.master

    def check_cast(self):
        """Raises where the codes are not those of the values yet."""
        if self.uncast is not None:
            raise LowpError(
                f"values were written into {self.rows} rows of a weight that FSDP2 shards, and {self.recipe.name} casts them when all ranks meet, since rows of "
                "several ranks share a scale: first make the optimizer (lowp.AdamW), load its state, load codes, or gather the weight if that was not done before"
            )

    def check_whole(self):
        """Raises where the codes are not those of all rows."""
        self.check_rows()
        self.check_cast()

    def check_rows(self):
        """Raises where a part of the rows was replaced and the others are of another scale, or where rows are padding."""
        if self.unpadded is not None:
            raise UnsupportedOp(
                f"{self.rows} rows, of which only {self.unpadded.rows} have content and the rest is padding; take those rows first "
                f"([:{self.unpadded.rows}])"
            )
        if self._stale is not None:
            rows = int(self._stale.sum())
            raise LowpError(f"{rows} of {self.rows} rows have another scale than the other rows, which were replaced; copy those rows, too")

    def map(self, change, with_master=True):
        """The same with every buffer, and the master, changed; or without a master."""
        self.derive()
        buffers = {name: change(buffer) for name, buffer in self.buffers.items()}
        master = change(self.known_master()) if with_master and self.master is not None else None
        device = next(iter(buffers.values())).device if buffers else self.device
        made = Store(self.recipe, self.rows, self.cols, buffers, device, master)
        made.amax, made.usage, made.is_part, made.cut = self.amax, self.usage, self.is_part, self.cut
        made.origin = None if with_master and device == self.device else weakref.ref(self)
        made.source = self.gathered_source
        if self.uncast is not None:
            made.uncast = master if master is not None else change(self.uncast) if with_master else self.uncast
        made._stale = None if self._stale is None else self._stale.clone()
        if self.blank:
            # FSDP2 moves padded rows, and then takes the rows without padding out of them.
            made.blank, made._prefixes = True, {rows: store.map(change) for rows, store in self._prefixes.items()}
        return made

    def quantize_(self, values, dtype, encode_scale=None):
        """Casts values into all buffers, and into the tensor that they were cut out of."""
        if encode_scale is not None:
            self.recipe.check_encode_scale(encode_scale)
        if self.device.type == "meta":
            return
        if self.cut is not None:
            raise UnsupportedOp(
                f"values written into {_cut.title(self)}: the other rows of those blocks share their scales. Write values into the whole tensor before it is "
                f"sharded, or {_cut.LOAD}"
            )
        self._check_window()
        if encode_scale is None:
            self._check_scale_is_own()
        self.begin_rewrite()
        amax = torch.zeros(1, dtype=torch.float32, device=self.device) if self.recipe.keeps_amax else None
        args = (encode_scale, None if amax is None else memory(amax))
        _lowp.quantize(device_of(self.device), self.recipe, self.shape, memory(values), dtype, self.named(), *args)
        self.amax = amax
        self._mark_loose(False)
        if self._window is not None:
            self._write_back()

    def _check_scale_is_own(self):
        """Raises where other ranks gather these rows with a scale of the whole tensor: a cast here would give this rank another one."""
        whole = self._whole()[0]
        shares = whole.is_part or (whole.gathers is not None and whole.gathers.world > 1)
        if shares and not self.is_delayed and any(spec.entry_rows == 0 for spec in self.specs(stored=True).values()):
            raise UnsupportedOp(
                f"values written into {self.rows} rows of a weight that FSDP2 shards: {self.recipe.name} has a scale that rows of several ranks share. The ranks "
                "agree on it in a step of lowp.AdamW. Load values on all ranks by set_model_state_dict with full_state_dict=True, or write them before the weight is gathered for the first time"
            )

    @property
    def is_delayed(self):
        """Whether the scale follows from casts before this one."""
        try:
            self.recipe.check_encode_scale(1.0)
        except LowpError:
            return False
        return True

    def encode_scale(self, master):
        """The delayed scale that the codes were made of a master with; ``None`` where there is none. The codes keep its inverse, which may be that
        of two: it is the one that makes these codes."""
        inverse = self._decode_scale()
        guess = 1 / inverse
        near = (guess, guess.nextafter(torch.tensor(0.0)), guess.nextafter(torch.tensor(torch.inf)))
        scales = [float(scale) for scale in near if 1 / scale == inverse]
        for scale in scales if len(scales) > 1 else ():
            buffers = {name: torch.empty_like(buffer) for name, buffer in self.buffers.items()}
            trial = Store(self.recipe, self.rows, self.cols, buffers, self.device)
            trial.quantize_(master, dtype_name(master.dtype), scale)
            if all(torch.equal(buffer, self.buffers[name]) for name, buffer in buffers.items()):
                return scale
        return scales[0] if scales else None

    def _decode_scale(self):
        return self.buffers["tensor_scale"].view(torch.float32).cpu()[0]

    def follow_master(self, master, encode_scale):
        """Casts a master with the delayed scale that its codes were saved with. Codes of that scale came with the model, and stay."""
        self.master = master
        if self.uncast is not None or 1 / torch.tensor(encode_scale) != self._decode_scale():
            self.quantize_(master, dtype_name(master.dtype), encode_scale)
        self.saved_scale = encode_scale

    def decode(self, orientation, dtype=torch.float32):
        """Values of ``dtype`` in the order of rows: those of float32, rounded."""
        if self.cut is not None:
            self.check_whole()
            return _cut.decode(self, orientation, dtype)
        written = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        out = torch.empty(self.shape, dtype=written, device=self.device)
        if orientation == "columnwise" and self.leaves_out_columnwise:
            orientation = "rowwise"
        buffers = self._for(orientation)
        device, name = device_of(self.device), dtype_name(written)
        if self.decodes is None:
            self.decodes = _lowp.Casts(_DECODES)
        self.decodes.decode(device, self.recipe, self.shape, buffers, orientation, memory(out), name)
        return out.to(dtype)

    def forward(self, input, bias):
        """The product of a layer by codes, and what its gradients need."""
        return _compile.forward(input, self, bias)

    def backward(self, grad, codes, scale, needs):
        """The gradients of a layer's input and weight by codes; ``None`` for those that nobody needs."""
        return _compile.backward(grad, codes, scale, self, needs)

    def _for(self, orientation):
        """Buffers that serve an orientation; a shard leaves out those that it can derive."""
        self.check_serves(orientation)
        if self.full is not None:
            self.full.check_there(self.buffers.values())
        return self.named()

    def derive(self):
        """Makes what a gathered tensor left for later: before all buffers are read."""
        if self.full is not None:
            self.full.check_there(self.buffers.values())
            self.full.derive()

    def check_serves(self, orientation):
        """Makes codes of an orientation that were left for later. Raises where a gathered tensor has none."""
        if self.source is not None and not self.serves(orientation):
            self.source.check_serves(orientation)
            missing = self.source.buffers.keys() - self.buffers.keys()
            self.buffers |= {name: self.source.buffers[name].to(self.device, copy=True) for name in missing}
        if self.full is None:
            return
        self.full.serve(self, orientation)
        if not self.serves(orientation):
            self.full.check_there(self.buffers.values())
            raise UnsupportedOp(
                f"the {orientation} codes of a weight were read outside of a backward, which FSDP2 gathered for the other phase; give that module "
                "reshard_after_forward=False, which gathers both directions at once. After an exception in a backward FSDP2 stays in that phase: make the "
                "model again, and load its state"
            )
        if orientation == "columnwise":
            self.full.derive()

    @property
    def gathered_source(self):
        """What copies of this take the codes of the other direction from, once that is gathered; ``None`` where they have both."""
        if self.full is None:
            return self.source
        return None if self.serves("rowwise") and self.serves("columnwise") else self

    @property
    def leaves_out_columnwise(self):
        """Whether it has no columnwise codes because they follow from the rowwise ones, as in a frozen weight."""
        whole = self.full is None and self.source is None
        return whole and self.serves("rowwise") and not self.serves("columnwise") and rowwise_suffices(self.recipe, self.shape)

    def serves(self, orientation):
        """Whether the codes of an orientation are there."""
        return f"{orientation}_data" in self.buffers or "shared_data" in self.buffers


@functools.cache
def rowwise_suffices(recipe, shape):
    """Whether the columnwise codes of a recipe are the rowwise ones or follow from them, and have the same values."""
    stored, rowwise = recipe.buffers(*shape, "both", True), recipe.buffers(*shape, "rowwise")
    return {spec.name for spec in stored} == {spec.name for spec in rowwise}


def _check_memory(what, tensor, dtype, shape):
    """Raises unless ``tensor`` is plain, contiguous memory of a dtype and a shape."""
    plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
    if not plain or tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        found = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise LowpError(f"{what} is {found}; give a contiguous tensor of {dtype} {shape}")

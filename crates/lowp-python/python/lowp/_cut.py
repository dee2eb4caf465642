"""Rows that FSDP2 cuts within blocks: a rank has the codes of its rows, in the order of rows, and the scales of all rows.

``Store.cut`` says which rows these are: the first one, and how many the whole matrix has. A rank without rows has the number of all rows as its first one.
"""

import torch

from ._errors import LowpError, UnsupportedOp

#: What to do where rows that cut blocks cannot be written.
LOAD = "load a full state dictionary by set_model_state_dict, with full_state_dict=True"


def is_within_blocks(recipe, start, end, rows):
    """Whether rows ``start`` to ``end`` of ``rows`` begin or end within a block."""
    quantum = recipe.row_quantum
    return start < end and bool(start % quantum or (end % quantum and end != rows))


def of_chunks(recipe, rows, chunk):
    """Whether a block is cut where every rank has ``chunk`` rows."""
    return is_within_blocks(recipe, 0, min(chunk, rows), rows)


def title(store):
    """The rows of a store in messages."""
    if store.cut is None:
        return f"{store.rows} rows with scales of their own"
    start, of = store.cut
    return f"rows {start} to {start + store.rows} of {of}, which begin or end within blocks"


def check_shard(store, rows, world, rank):
    """Raises where a shard of ``rank`` has other rows than FSDP2 cuts for it."""
    chunk = -(-rows // world)
    expected = (min(chunk * rank, rows), rows) if of_chunks(store.recipe, rows, chunk) else None
    if store.cut != expected:
        where = "within blocks" if expected else "between blocks"
        raise LowpError(
            f"rank {rank} has {title(store)}, and {rows} rows of {store.recipe.name} over {world} ranks are cut {where}; shard the whole tensor with fully_shard"
        )


def rows_of(whole, start, end):
    """The buffers of rows of a whole matrix."""
    whole.derive()
    kept, buffers = whole.specs(), {}
    for spec in whole.recipe.buffers(end - start, whole.cols, cut_of=whole.rows):
        of, data = kept[spec.name], whole_of(whole, spec.name)
        if data is None:
            raise UnsupportedOp(f"rows cannot be taken from a tensor without {spec.name}; quantize it for both directions (usage='both')")
        if spec.entry_rows == 0:
            buffers[spec.name] = data.clone()
            continue
        if of.rows_first or not spec.bytes:
            buffers[spec.name] = data[start * of.row_bytes : end * of.row_bytes]
            continue
        # The bytes that have the rows, which may have one before and one after them.
        first, last = start * of.entry_bits // 8, -(-end * of.entry_bits // 8)
        columns = data.view(whole.cols, of.row_bytes)[:, first:last]
        rows = transposed(columns, of.entry_bits).view(-1, spec.row_bytes)
        before = start - first * 8 // of.entry_bits
        buffers[spec.name] = rows[before : before + end - start].reshape(-1)
    return buffers


def whole_of(whole, name):
    """A buffer of a whole matrix, also a scale that a shard leaves out since it can be derived; ``None`` where it is not there."""
    specs = whole.specs()
    rowwise = name.replace("columnwise", "rowwise")
    if name in whole.buffers or not specs[name].is_transpose or rowwise not in whole.buffers:
        return whole.buffers.get(name)
    return transposed(whole.buffers[rowwise].view(-1, specs[rowwise].row_bytes), specs[name].entry_bits)


def transposed(table, bits):
    """The transpose of a table of bytes whose rows have entries of so many bits, flat."""
    if bits != 4:
        return table.reshape(table.shape[0], -1, bits // 8).transpose(0, 1).reshape(-1)
    entries = torch.stack((table & 15, table >> 4), -1).flatten(1).t()
    if entries.shape[1] % 2:
        entries = torch.nn.functional.pad(entries, (0, 1))
    return (entries[:, 0::2] | entries[:, 1::2] << 4).reshape(-1)


def parts_of(whole, rows, start, end):
    """The parts of the buffers of a whole matrix that rows within blocks are written to, as ``Store._cuts``; ``None`` for codes in the order of
    columns."""
    parts = {}
    for name, spec in rows.specs().items():
        of = whole.specs()[name]
        if spec.entry_rows == 0:
            if name in whole.buffers:  # else it is derived
                parts[name] = (whole.buffers[name], True)
        else:
            parts[name] = (whole.buffers[name][start * of.row_bytes : end * of.row_bytes] if of.rows_first else None, False)
    return parts


def write_columns(whole, name, start, rows):
    """Writes codes in the order of rows to those of a whole matrix in the order of columns."""
    spec = whole.specs()[name]
    table = transposed(whole.buffers[name].view(whole.cols, spec.row_bytes), spec.entry_bits)
    table = table.view(-1, whole.cols * spec.entry_bits // 8)[: whole.rows]
    rows = rows.view(-1, table.shape[1])
    table[start : start + len(rows)] = rows
    whole.buffers[name].copy_(transposed(table, spec.entry_bits))


def blocks_of(store, first, last):
    """Rows ``first`` to ``last`` of the whole, between blocks, with the scales of those rows; codes of rows that ``store`` has not are zeros."""
    start, of = store.cut
    made = store.empty(store.recipe, last - first, store.cols, store.device, stored=True)
    wholes = {spec.name: spec for spec in store.recipe.buffers(of, store.cols)}
    for name, spec in made.specs(stored=True).items():
        own, to, whole = store.buffers[name], made.buffers[name], wholes[name]
        if not spec.bytes:
            continue
        if spec.name.endswith("_data"):
            rows = own.new_zeros(last - first, store.cols * spec.entry_bits // 8)
            rows[start - first : start - first + store.rows] = own.view(-1, rows.shape[1])
            to.copy_(rows.view(-1) if spec.rows_first else transposed(rows, spec.entry_bits))
        elif spec.entry_rows == 0:
            to.copy_(own)
        else:
            entries = slice(first // spec.entry_rows, -(-last // spec.entry_rows))
            if spec.rows_first:
                to.copy_(own.view(-1, whole.row_bytes)[entries].reshape(-1))
            else:
                to.copy_(own.view(-1, whole.row_bytes * 8 // spec.entry_bits, spec.entry_bits // 8)[:, entries].reshape(-1))
    return made


def decode(store, orientation, dtype):
    """Values of rows within blocks."""
    (start, of), quantum = store.cut, store.recipe.row_quantum
    if store.rows * store.cols == 0:
        return torch.empty(store.shape, dtype=dtype, device=store.device)
    first, last = start // quantum * quantum, min(-(-(start + store.rows) // quantum) * quantum, of)
    return blocks_of(store, first, last).decode(orientation, dtype)[start - first : start - first + store.rows].clone()


def cut_like(rows, store):
    """The rows of a store that cuts blocks with the scales that another one of as many rows has, where those are a part of its scales; ``None`` where
    they are not."""
    if rows.cut is None:
        return None
    at, of = store.cut or (0, store.rows)
    first = rows.cut[0] - at
    if first < 0 or first + of > rows.cut[1] or is_within_blocks(rows.recipe, first, first + of, rows.cut[1]):
        return None
    rows.check_whole()
    made = blocks_of(rows, first, first + of)
    made.amax = rows.amax
    if store.cut is not None:
        made = made.slice_within_blocks(at, at + store.rows)
    made.master = rows.known_master()
    return made

//! How an encode walks a matrix: row tiles, column chunks, and which outputs share a quantization.

use lowp_format::{
    Axis, Code, FormatError, KernelKey, Orientation, Part, ScaleLayout, Shape, Usage, cdiv,
};
use smallvec::SmallVec;

use super::Cpu;
use crate::table::{Traits, traits};
use crate::{KernelError, Target};

/// Rows of a tile, at least, in bytes of a transposed output: whole cache lines.
const TILE_BYTES: usize = 64;
/// Elements of a chunk of many rows, about: its values are packed without gaps, and stay in the
/// second-level cache from the amax to the last store. Long rows stream; short ones, a power of two
/// apart in the source, would evict each other.
const PACKED: usize = 512 * 1024;
/// Elements of a chunk of single rows: its values stay in the second-level cache.
/// Longer runs stream better: AdamW with MXFP8 runs at 4.4 GB/s in chunks of 4096, at 5.3 in these.
const CHUNK: usize = 32 * 1024;
/// Longest side of a block.
const MAX_BLOCK: usize = 4096;

/// One buffer that a quantization fills.
#[derive(Clone, Debug)]
pub(crate) struct Output {
    /// Its index among the job's targets.
    pub(crate) target: usize,
    /// Data or block scales.
    pub(crate) part: Part,
    /// Whether its physical rows follow the matrix's columns.
    pub(crate) transposed: bool,
    code: Code,
    /// Matrix rows per entry.
    unit: usize,
    /// Bytes of a physical row.
    pub(crate) row_bytes: usize,
    /// Physical rows.
    physical_rows: usize,
}

impl Output {
    fn new(target: usize, spec: &lowp_format::BufferSpec, shape: Shape) -> Self {
        Self {
            target,
            part: spec.key.part,
            transposed: spec.axes[0] == Axis::Cols,
            code: spec.code,
            unit: spec.block()[0],
            row_bytes: spec.row_bytes(shape),
            physical_rows: spec.entries(shape)[0],
        }
    }

    /// Rows of the byte matrix that tiles are column ranges of. A row-major buffer is one row: its
    /// tiles are contiguous.
    pub(crate) fn band_rows(&self) -> usize {
        if self.transposed {
            self.physical_rows
        } else {
            1
        }
    }

    /// Where matrix row `row` begins in that byte matrix.
    pub(crate) fn cut(&self, row: usize) -> usize {
        let entries = cdiv(row, self.unit);
        if self.transposed {
            self.code.bytes(entries)
        } else {
            entries * self.row_bytes
        }
    }
}

/// Outputs that one quantization fills.
#[derive(Clone, Debug)]
pub(crate) struct Pass {
    /// Block rows x columns, where blocks have scales.
    pub(crate) block: Option<[usize; 2]>,
    /// What it fills.
    pub(crate) outputs: SmallVec<[Output; 4]>,
}

/// The walk of one encode.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layout {
    /// One per distinct block.
    pub(crate) passes: SmallVec<[Pass; 2]>,
    /// Rows of a tile: a multiple of every block's rows, and even.
    pub(crate) tile_rows: usize,
    /// Rows of a chunk: a divisor of the tile's rows and a multiple of every block's rows.
    pub(crate) chunk_rows: usize,
    /// Columns of a chunk: a multiple of every block's columns, and even.
    pub(crate) chunk_cols: usize,
}

impl Layout {
    /// The walk that fills `targets`.
    ///
    /// # Errors
    /// Ingredients without a kernel, or targets that are not made of them.
    pub(crate) fn new(
        shape: Shape,
        key: &KernelKey,
        targets: &[Target<Cpu>],
    ) -> Result<Self, KernelError> {
        let traits = traits(key)?;
        let mut passes: SmallVec<[Pass; 2]> = SmallVec::new();
        for (index, target) in targets.iter().enumerate() {
            let spec = &target.spec;
            check_target(shape, key, &traits, target)?;
            if spec.key.part == Part::TensorScale {
                continue;
            }
            let block = block_of(key, spec.key.usage)?;
            let output = Output::new(index, spec, shape);
            match passes.iter_mut().find(|pass| pass.block == block) {
                Some(pass) => pass.outputs.push(output),
                None => passes.push(Pass {
                    block,
                    outputs: [output].into_iter().collect(),
                }),
            }
        }
        let blocks = || passes.iter().filter_map(|pass| pass.block);
        let rows = blocks().fold(2, |unit, block| lcm(unit, block[0]));
        let cols = blocks().fold(2, |unit, block| lcm(unit, block[1]));
        let turned = || {
            let outputs = passes.iter().flat_map(|pass| &pass.outputs);
            outputs.filter(|output| output.transposed)
        };
        let per_byte = turned().map(|output| output.code.entries_per_byte()).max();
        let tile_rows = (TILE_BYTES * per_byte.unwrap_or(1)).next_multiple_of(rows);
        let unit = blocks().fold(1, |unit, block| lcm(unit, block[0]));
        let packed = |rows: usize| {
            (
                rows,
                (std::env::var("PK")
                    .ok()
                    .and_then(|x| x.parse().ok())
                    .unwrap_or(PACKED)
                    / rows)
                    .max(1)
                    .next_multiple_of(cols),
            )
        };
        let (chunk_rows, chunk_cols) = if per_byte.is_some() {
            packed(tile_rows)
        } else if unit > 1 {
            packed(unit)
        } else {
            let chunk_cols = CHUNK.min(shape.cols).max(1).next_multiple_of(cols);
            // The largest divisor of the tile that keeps a chunk small.
            let fits = |n: &usize| tile_rows.is_multiple_of(*n) && n * chunk_cols <= CHUNK;
            ((1..=tile_rows).rev().find(fits).unwrap_or(1), chunk_cols)
        };
        Ok(Self {
            passes,
            tile_rows,
            chunk_rows,
            chunk_cols,
        })
    }

    /// Where `rows` rows are cut into tiles.
    pub(crate) fn row_cuts(&self, rows: usize) -> impl Iterator<Item = usize> {
        let tile = self.tile_rows;
        (0..=cdiv(rows, tile)).map(move |i| (i * tile).min(rows))
    }
}

/// The block that every orientation of `usage` has.
pub(crate) fn block_of(key: &KernelKey, usage: Usage) -> Result<Option<[usize; 2]>, KernelError> {
    let mut blocks = usage
        .orientations()
        .map(|orientation| key.block(orientation));
    let first = blocks.next().flatten();
    if blocks.any(|block| block != first) {
        let what = format!(
            "one buffer for both orientations where their blocks differ ({:?})",
            key.blocks
        );
        return Err(KernelError::NoKernel { what });
    }
    Ok(first)
}

/// Refuses a target that is not made of the ingredients of `key`.
pub(crate) fn check_target(
    shape: Shape,
    key: &KernelKey,
    traits: &Traits,
    target: &Target<Cpu>,
) -> Result<(), KernelError> {
    let spec = &target.spec;
    let refuse = |why: String| {
        Err(KernelError::NoKernel {
            what: format!("{}: {why}", spec.key),
        })
    };
    if spec.key.usage.is_empty() {
        return refuse("it serves no orientation".to_owned());
    }
    if spec.axes[0] == spec.axes[1] {
        return refuse("both physical axes follow the same logical axis".to_owned());
    }
    match spec.key.part {
        Part::TensorScale if !traits.tensor => {
            return refuse(format!("{:?} scales have no tensor part", key.scale));
        }
        Part::TensorScale if spec.code != Code::F32 => {
            return refuse(format!("a tensor scale is F32, not {}", spec.code));
        }
        Part::TensorScale => return Ok(()),
        Part::Data if spec.code != key.element || spec.tile != [1, 1] => {
            let tile = spec.tile;
            let [code, element] = [spec.code, key.element];
            return refuse(format!(
                "{code} entries of {tile:?} elements, not {element} of 1"
            ));
        }
        Part::Data => {}
        Part::BlockScale => {
            let block = block_of(key, spec.key.usage)?;
            if Some(spec.code) != traits.entry || Some(spec.block()) != block {
                let [code, found] = [format!("{}", spec.code), format!("{:?}", spec.block())];
                return refuse(format!(
                    "{code} entries over {found} blocks, the kernel {block:?}"
                ));
            }
        }
    }
    let sides = key.blocks.iter().flatten().flatten();
    if let Some(side) = sides
        .into_iter()
        .find(|side| !(1..=MAX_BLOCK).contains(*side))
    {
        return refuse(format!("block sides are 1 to {MAX_BLOCK}, not {side}"));
    }
    let packed = if spec.axes[1] == Axis::Cols {
        spec.code.entries_per_byte()
    } else {
        1
    };
    let multiple = Orientation::ALL
        .into_iter()
        .filter(|o| spec.key.usage.contains(o.usage()))
        .filter_map(|o| key.block(o))
        .fold(packed, |unit, block| lcm(unit, block[1]));
    if !shape.cols.is_multiple_of(multiple) {
        let recipe = "the kernel";
        return Err(FormatError::Columns {
            recipe,
            shape,
            multiple,
        }
        .into());
    }
    Ok(())
}

/// Whether `from` has an entry for every entry of `to`.
pub(super) fn covers(from: &ScaleLayout, to: &ScaleLayout) -> bool {
    let sides = from.tile.into_iter().chain(to.tile);
    if sides.into_iter().any(|side| side == 0) {
        return false;
    }
    let Some(last) = to.entries[0]
        .checked_sub(1)
        .zip(to.entries[1].checked_sub(1))
    else {
        return true;
    };
    let [row, col] = to.element(last.0, last.1);
    let at = match from.axes[0] {
        Axis::Rows => [row / from.tile[0], col / from.tile[1]],
        Axis::Cols => [col / from.tile[0], row / from.tile[1]],
    };
    at[0] < from.entries[0] && at[1] < from.entries[1]
}

fn lcm(a: usize, b: usize) -> usize {
    let gcd = |mut a: usize, mut b: usize| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    a / gcd(a, b) * b
}

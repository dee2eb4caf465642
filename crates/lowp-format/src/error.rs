//! [`FormatError`]: every way in which a shape, recipe, layout or plan can be wrong.

use thiserror::Error;

use crate::{BufferKey, Orientation, Shape, Usage};

/// An error of this crate: what is wrong, with the numbers and the remedy.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum FormatError {
    /// A tensor of fewer than two dimensions.
    #[error(
        "shape {dims:?} has fewer than two dimensions; a quantized tensor is a matrix (reshape it, or keep it in high precision)"
    )]
    NotAMatrix {
        /// The dimensions given.
        dims: Vec<usize>,
    },
    /// More bytes than can be addressed.
    #[error("shape {dims:?} has more elements than this machine can address")]
    TooLarge {
        /// The dimensions given.
        dims: Vec<usize>,
    },
    /// Text that is no shape.
    #[error("'{text}' is not a shape; write rows x columns, for example 4096x1024")]
    BadShape {
        /// The text given.
        text: String,
    },
    /// A column count that the recipe cannot block.
    #[error("{shape}: {recipe} needs a multiple of {multiple} columns (K), and {cols} is not one (pad the last dimension to {padded}, or choose another recipe)", cols = shape.cols, padded = shape.cols.next_multiple_of(*multiple))]
    Columns {
        /// The recipe's name.
        recipe: &'static str,
        /// The shape given.
        shape: Shape,
        /// K must be a multiple of this.
        multiple: usize,
    },
    /// No recipe of that name.
    #[error("there is no recipe '{name}'; the recipes are {known}")]
    UnknownRecipe {
        /// The name given.
        name: String,
        /// The known names.
        known: String,
    },
    /// An option that the recipe does not have.
    #[error("{recipe} has no option {option}; leave it out, or choose a recipe that has it")]
    UnusedOption {
        /// The recipe's name.
        recipe: &'static str,
        /// The option's name.
        option: String,
    },
    /// An option value outside its range.
    #[error("{option} = {value} is out of range: {expected}")]
    OptionValue {
        /// The option's name.
        option: &'static str,
        /// The value given.
        value: String,
        /// What is allowed.
        expected: String,
    },
    /// Text that spells no recipe, `NAME+MODIFIER`.
    #[error("{message}")]
    Spelling {
        /// What is wrong, and the remedy.
        message: String,
    },
    /// No ranks.
    #[error("a world of 0 ranks is not possible; the world size must be at least 1")]
    EmptyWorld,
    /// Shards cut off the recipe's quantum.
    #[error(
        "{rows} rows over {world} ranks: {recipe} {usage} needs cuts at multiples of {quantum}, and rank {rank} begins at row {start} (let RowCuts::new place the cuts)"
    )]
    OffQuantum {
        /// The recipe's name.
        recipe: &'static str,
        /// The usages that are gathered.
        usage: Usage,
        /// Rows of the full tensor.
        rows: usize,
        /// Number of ranks.
        world: usize,
        /// Cuts must be multiples of this.
        quantum: usize,
        /// The first rank that begins off the quantum.
        rank: usize,
        /// Where it begins.
        start: usize,
    },
    /// Tiles of a shard that a matrix cannot have.
    #[error("{recipe} {full} in shard tiles of {cols} columns: {why}; shard it by whole rows")]
    ShardTiles {
        /// The recipe's name.
        recipe: &'static str,
        /// The matrix.
        full: Shape,
        /// Columns of a tile.
        cols: usize,
        /// What is wrong.
        why: String,
    },
    /// Groups that the ranks cannot be split into.
    #[error("{world} rank{} cannot be split into groups of {ranks} to reshard to; give {}", if *world == 1 { "" } else { "s" }, divisors(*world))]
    ReshardGroup {
        /// Ranks of a group.
        ranks: usize,
        /// Ranks to split.
        world: usize,
    },
    /// A policy of another name.
    #[error(
        "'{text}' is not a reshard policy; give true, false, or a number of ranks to reshard to, such as 8"
    )]
    BadReshard {
        /// What was given.
        text: String,
    },
    /// Shards that do not tile the tensor.
    #[error(
        "the shards do not cover {rows} rows in order: rank {rank} holds rows {start}..{end}, but the next row is {expected}"
    )]
    NotATiling {
        /// Rows of the full tensor.
        rows: usize,
        /// The first rank that is out of place.
        rank: usize,
        /// Its first row.
        start: usize,
        /// One past its last row.
        end: usize,
        /// Where it should begin.
        expected: usize,
    },
    /// Cuts that were made for a tensor with other rows.
    #[error(
        "the cuts for {world} ranks cover {rows} rows, but the tensor is {full}; make the cuts for this tensor"
    )]
    CutsOfOtherRows {
        /// Shape of the full tensor.
        full: Shape,
        /// Rows that the cuts cover.
        rows: usize,
        /// Number of ranks.
        world: usize,
    },
    /// A buffer that the tensor does not hold.
    #[error(
        "the tensor holds no {key}: it was made for usage {usage}; quantize or gather it for that usage first"
    )]
    MissingBuffer {
        /// The buffer asked for.
        key: BufferKey,
        /// What the tensor can serve.
        usage: Usage,
    },
    /// An orientation that the tensor cannot serve.
    #[error(
        "the tensor has usage {usage} and cannot serve {orientation}; gather or quantize it for that usage"
    )]
    MissingUsage {
        /// The orientation asked for.
        orientation: Orientation,
        /// What the tensor can serve.
        usage: Usage,
    },
    /// A description that no buffer has.
    #[error("{key} cannot be laid out: {why}")]
    NoSuchBuffer {
        /// The buffer.
        key: BufferKey,
        /// What is wrong.
        why: String,
    },
    /// A layout that the buffer does not have.
    #[error("{key} has no {form} form: {why}; choose another form")]
    NoSuchForm {
        /// The buffer.
        key: BufferKey,
        /// The form asked for.
        form: &'static str,
        /// Why not.
        why: &'static str,
    },
}

impl FormatError {
    pub(crate) fn spelling(message: String) -> Self {
        Self::Spelling { message }
    }
}

/// The group sizes that `world` ranks can be split into, as text.
fn divisors(world: usize) -> String {
    let found = (1..=world).filter(|n| world.is_multiple_of(*n));
    let found: Vec<String> = found.map(|n| n.to_string()).collect();
    match found.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => "1".to_owned(),
    }
}

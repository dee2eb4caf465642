//! What a rank tells the first one of its pieces: the blocks of each [`Table`]'s kinds. Tables are long, and most ranks have the same one:
//! they tell its digest, and the first rank asks one of them for it. Checksums stay in the file of the rank.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::index::{FileRecord, Kind, Kinds};
use crate::{Block, Dtype};

/// The tensors of a rank, whatever blocks of them it has: those of one kind have the same dtype and shape, and this rank has the same blocks
/// of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Table {
    kinds: Vec<(Dtype, [usize; 2])>,
    /// The number of the kind of each tensor.
    tensors: BTreeMap<String, usize>,
}

impl Table {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        postcard::to_stdvec(self).unwrap_or_default()
    }

    pub(crate) fn from_bytes(bytes: &[u8], digest: u64) -> Result<Self, String> {
        if digest_of(bytes) != digest {
            return Err("its list of tensors is another one than it said".to_owned());
        }
        postcard::from_bytes(bytes).map_err(|error| format!("its list of tensors: {error}"))
    }
}

fn digest_of(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// What a rank reports to the first one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RankReport {
    pub(crate) file: FileRecord,
    /// The digest of its table.
    pub(crate) table: u64,
    /// The bytes of its table.
    pub(crate) length: u64,
    /// The blocks of each kind of its table, in order; none is empty.
    pub(crate) blocks: Vec<Vec<Block>>,
}

/// A rank's pieces of a tensor.
#[derive(Clone, Debug)]
pub(crate) struct Part<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: Dtype,
    /// Shape of the whole tensor.
    pub(crate) full: [usize; 2],
    pub(crate) blocks: Vec<Block>,
}

/// The table of `parts`, and the blocks of its kinds.
pub(crate) fn table_of<'a>(parts: impl IntoIterator<Item = Part<'a>>) -> (Table, Vec<Vec<Block>>) {
    let (mut table, mut all) = (Table::default(), Vec::new());
    let mut numbers = HashMap::new();
    for part in parts {
        let Part {
            name,
            dtype,
            full,
            mut blocks,
        } = part;
        blocks.retain(|block| !block.is_empty());
        blocks.sort_unstable();
        let number = *numbers
            .entry((dtype, full, blocks))
            .or_insert_with_key(|(_, _, blocks)| {
                table.kinds.push((dtype, full));
                all.push(blocks.clone());
                all.len() - 1
            });
        table.tensors.insert(name.to_owned(), number);
    }
    (table, all)
}

impl RankReport {
    pub(crate) fn new(file: FileRecord, table: &[u8], blocks: Vec<Vec<Block>>) -> Self {
        Self {
            file,
            table: digest_of(table),
            length: table.len() as u64,
            blocks,
        }
    }
}

/// The kinds of all tensors, and the kind of each, from the `reports` of all ranks, by rank, and their `tables`.
pub(crate) fn merge(
    reports: &[RankReport],
    tables: &HashMap<u64, Table>,
) -> Result<(Vec<Kind>, BTreeMap<String, usize>), String> {
    // The ranks of each table, and where tensors stand: in which tables, as which kinds.
    let mut ranks: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (rank, report) in reports.iter().enumerate() {
        ranks.entry(report.table).or_default().push(rank);
    }
    let mut parts: BTreeMap<&str, Vec<(u64, usize)>> = BTreeMap::new();
    for &digest in ranks.keys() {
        let table = tables.get(&digest).ok_or("a list of tensors is missing")?;
        for (name, &kind) in &table.tensors {
            parts.entry(name).or_default().push((digest, kind));
        }
    }
    let (mut kinds, mut tensors, mut known) = (Kinds::default(), BTreeMap::new(), HashMap::new());
    for (name, parts) in parts {
        if let Some(&number) = known.get(&parts) {
            tensors.insert(name.to_owned(), number);
            continue;
        }
        let mut found = None;
        let mut pieces = Vec::new();
        for &(digest, kind) in &parts {
            let of = tables[&digest]
                .kinds
                .get(kind)
                .ok_or("a tensor of no kind")?;
            let first = ranks[&digest][0];
            match found {
                Some((other, before)) if other != *of => {
                    let words =
                        |(dtype, shape): (Dtype, [usize; 2])| format!("{dtype:?} {shape:?}");
                    let (is, was) = (words(*of), words(other));
                    return Err(format!(
                        "tensor '{name}' is {is} on rank {first} and {was} on rank {before}"
                    ));
                }
                Some(_) => {}
                None => found = Some((*of, first)),
            }
            for &rank in &ranks[&digest] {
                let blocks = reports[rank]
                    .blocks
                    .get(kind)
                    .ok_or("a kind without blocks")?;
                pieces.extend(blocks.iter().map(|&block| (rank, block)));
            }
        }
        let Some(((dtype, shape), _)) = found else {
            continue;
        };
        let number = kinds.number(dtype, shape, pieces);
        known.insert(parts, number);
        tensors.insert(name.to_owned(), number);
    }
    Ok((kinds.all, tensors))
}

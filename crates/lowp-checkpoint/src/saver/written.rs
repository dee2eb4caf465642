//! [`Written`]: what all ranks say that they have written, which the first rank makes an index of.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use serde_json::Value;

use crate::CheckpointError;
use crate::index::{INDEX, Index, MAX_INDEX};
use crate::list::{RankReport, Table, merge};

/// Most bytes of the lists of tensors that the first rank has in memory.
pub(super) const MAX_TABLES: u64 = MAX_INDEX;

/// What all ranks have written.
pub(super) struct Written {
    pub(super) reports: Vec<RankReport>,
    /// By digest.
    pub(super) tables: Vec<(u64, Vec<u8>)>,
}

impl Written {
    /// The index of it, which makes sense.
    pub(super) fn index(self, id: String, step: u64, about: Value) -> Result<Index, String> {
        let read = |(digest, bytes): &(u64, Vec<u8>)| {
            Table::from_bytes(bytes, *digest).map(|table| (*digest, table))
        };
        let tables: HashMap<u64, Table> = self.tables.iter().map(read).collect::<Result<_, _>>()?;
        let (kinds, tensors) = merge(&self.reports, &tables)?;
        let index = Index {
            id,
            step,
            files: self.reports.into_iter().map(|report| report.file).collect(),
            kinds,
            tensors,
            about,
            checksums: None,
        };
        index.check()?;
        Ok(index)
    }
}

/// The reports of all ranks, and the ranks whose tables are asked for: a table that no rank before has, and that is not `own`, the one of
/// the first rank. Or the first rank that could not write into `folder`, and why not.
pub(super) fn read_reports(
    all: &[Vec<u8>],
    own: u64,
    folder: &Path,
) -> Result<(Vec<RankReport>, Vec<usize>), (usize, String)> {
    let (mut reports, mut known, mut asked) = (Vec::new(), BTreeSet::from([own]), Vec::new());
    let mut bytes = 0;
    for (rank, of_rank) in all.iter().enumerate() {
        let of_rank = postcard::from_bytes::<Result<RankReport, String>>(of_rank);
        let of_rank = of_rank.map_err(|error| error.to_string()).flatten();
        let of_rank = of_rank.map_err(|why| (rank, why))?;
        if known.insert(of_rank.table) {
            asked.push(rank);
            bytes += of_rank.length;
        }
        reports.push(of_rank);
    }
    if bytes > MAX_TABLES {
        let error = CheckpointError::TooLong {
            path: folder.join(INDEX),
            what: "the lists of tensors",
            pieces: reports
                .iter()
                .flat_map(|report| &report.blocks)
                .map(Vec::len)
                .sum(),
            bytes,
            most: MAX_TABLES,
        };
        return Err((0, error.to_string()));
    }
    Ok((reports, asked))
}

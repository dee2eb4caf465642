//! Token ids as Megatron-LM has them: a `.bin` file of ids and an `.idx` file that says how long documents are.

use std::path::{Path, PathBuf};

use super::shard::{IdDtype, Shard, unreadable};
use crate::error::TrainError;

const MAGIC: &[u8] = b"MMIDIDX\x00\x00";
/// Longest index that is read.
const MAX_INDEX: u64 = 1 << 34;

/// The `.bin` and `.idx` files that `path` names: one of them, or both without their ends.
pub(super) fn files(path: &Path) -> Option<[PathBuf; 2]> {
    let end = path.extension().and_then(|end| end.to_str());
    let stem = match end {
        Some("bin" | "idx") => path.with_extension(""),
        _ => path.to_owned(),
    };
    let with = |end: &str| {
        let mut name = stem.clone().into_os_string();
        name.push(end);
        PathBuf::from(name)
    };
    let both = [with(".bin"), with(".idx")];
    both.iter().all(|path| path.is_file()).then_some(both)
}

/// The ids of both files.
pub(super) fn read([bin, idx]: &[PathBuf; 2]) -> Result<Shard, TrainError> {
    let index = lowp_file::files::read_regular(idx, MAX_INDEX).map_err(|e| unreadable(idx, e))?;
    let mut rest = index.as_slice();
    let short = || unreadable(idx, "it is cut off");
    let mut take = |bytes: usize| {
        let (taken, left) = rest.split_at_checked(bytes).ok_or_else(short)?;
        rest = left;
        Ok::<_, TrainError>(taken)
    };
    if take(MAGIC.len())? != MAGIC {
        return Err(unreadable(idx, "it is no index of Megatron-LM"));
    }
    let number = |bytes: &[u8]| {
        let word = <[u8; 8]>::try_from(bytes).map_err(|_| short())?;
        usize::try_from(u64::from_le_bytes(word)).map_err(|e| unreadable(idx, e))
    };
    let version = number(take(8)?)?;
    if version != 1 {
        return Err(unreadable(idx, format!("its version is {version}, not 1")));
    }
    let dtype = match take(1)? {
        [1] => IdDtype::U8,
        [4] => IdDtype::I32,
        [5] => IdDtype::I64,
        [8] => IdDtype::U16,
        other => {
            let why =
                format!("its dtype has code {other:?}; ids are uint8, uint16, int32 or int64");
            return Err(unreadable(idx, why));
        }
    };
    let (sequences, documents) = (number(take(8)?)?, number(take(8)?)?);
    let size = |count: usize, width: usize| count.checked_mul(width).ok_or_else(short);
    let (lengths, _) = take(size(sequences, 4)?)?.as_chunks::<4>();
    take(size(sequences, 8)?)?;
    let (documents, _) = take(size(documents, 8)?)?.as_chunks::<8>();
    let mut ends = Vec::with_capacity(sequences + 1);
    let mut tokens = 0u64;
    ends.push(tokens);
    for &length in lengths {
        let length = u32::try_from(i32::from_le_bytes(length));
        tokens += u64::from(length.map_err(|e| unreadable(idx, e))?);
        ends.push(tokens);
    }
    let of_document = |&at: &[u8; 8]| {
        let at = usize::try_from(i64::from_le_bytes(at)).ok();
        let end = at.and_then(|at| ends.get(at)).copied();
        end.ok_or_else(|| unreadable(idx, "a document begins beyond the last sequence"))
    };
    let documents: Result<Vec<u64>, _> = documents.iter().map(of_document).collect();
    let mut documents = documents?;
    if let Some(at) = documents.windows(2).position(|pair| pair[0] > pair[1]) {
        let (before, after) = (documents[at], documents[at + 1]);
        let why = format!(
            "document {} begins at token {after}, the one before it at {before}",
            at + 1
        );
        return Err(unreadable(idx, why));
    }
    documents.retain(|&end| end > 0);
    Ok(Shard::open(bin, 0, dtype, tokens)?.with_ends(documents))
}

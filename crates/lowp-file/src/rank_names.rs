//! The names of rank files, and whether a folder has all of them.

use crate::checkpoint::is_checkpoint;
use crate::error::{Result, file_error, mend_file};
use crate::limits::hinted;
use crate::meta::MAX_WORLD;
use crate::remedy::Remedy;
use crate::text::dims;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

pub(crate) fn file_name(rank: usize, world: usize) -> String {
    format!("rank-{rank:05}-of-{world:05}.safetensors")
}

fn parse(name: &str) -> Option<(usize, usize)> {
    let (rank, world) = name
        .strip_prefix("rank-")?
        .strip_suffix(".safetensors")?
        .split_once("-of-")?;
    let number = |text: &str| {
        text.parse()
            .ok()
            .filter(|_| text.bytes().all(|b| b.is_ascii_digit()))
    };
    Some((number(rank)?, number(world)?))
}

/// Whether a folder with these `names` is one of rank files.
pub(crate) fn are_in(names: &[String]) -> bool {
    names.iter().any(|name| parse(name).is_some())
}

/// Whether `path` is a folder that has rank files.
pub fn is_folder(path: &Path) -> bool {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let mut names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.any(|name| parse(&name).is_some())
}

/// The files of all ranks, in rank order. Each is to be opened only when it is read: what one says of its tensors is as
/// much as the whole model says.
///
/// # Errors
/// A folder without rank files, of more than one world, or in which a rank is missing.
pub fn paths(folder: &Path) -> Result<Vec<PathBuf>> {
    let cannot = |e: io::Error| file_error!(folder, "cannot read this folder: {}", hinted(e));
    let mut found: BTreeMap<usize, PathBuf> = BTreeMap::new();
    let mut worlds = BTreeSet::new();
    for entry in fs::read_dir(folder).map_err(cannot)? {
        let entry = entry.map_err(cannot)?;
        if let Some((rank, world)) = entry.file_name().to_str().and_then(parse) {
            found.insert(rank, entry.path());
            worlds.insert(world);
        }
    }
    let worlds: Vec<usize> = worlds.into_iter().collect();
    let world = match worlds[..] {
        [] if is_checkpoint(folder) => {
            return Err(mend_file(
                folder,
                "a checkpoint and no folder of rank files",
                Remedy::ExportCheckpoint,
            ));
        }
        [] => {
            let first = file_name(0, 2);
            return Err(mend_file(
                folder,
                "no rank files",
                Remedy::GiveRankFiles { first },
            ));
        }
        [world] if (1..=MAX_WORLD).contains(&world) => world,
        [world] => {
            return Err(file_error!(
                folder,
                "rank files of {world} ranks; 1 to {MAX_WORLD} are possible"
            ));
        }
        _ => {
            return Err(mend_file(
                folder,
                format!("rank files of different worlds ({} ranks)", dims(&worlds)),
                Remedy::KeepOneWorld,
            ));
        }
    };
    if let Some((rank, _)) = found.last_key_value().filter(|(rank, _)| **rank >= world) {
        return Err(file_error!(
            folder,
            "rank {rank} is outside a world of {world}; remove its file"
        ));
    }
    (0..world)
        .map(|rank| match found.get(&rank) {
            Some(path) => Ok(path.clone()),
            None => Err(file_error!(
                folder,
                "{} is missing; put it back, or shard the model again",
                file_name(rank, world)
            )),
        })
        .collect()
}

//! Checkpoints of 70b and 671b parameters over 1,024 and 16,384 ranks: the real code, and files without data.
//!
//! `cargo run --release -p lowp-checkpoint --example scale`; words behind `--` choose lines: `-- 70b even 1024`. Ranks make their lists, the
//! first one the index; a few ranks write their files, whose entries are zeros that take no room on the disk, and a few resume. Where ranks
//! have the same tensors, some make their lists from all of their pieces, and the others from one tensor of each kind.

#![expect(
    dead_code,
    unreachable_pub,
    reason = "the modules of the crate, of which only some functions are called"
)]

#[path = "../../src/block.rs"]
mod block;
#[path = "../../src/error.rs"]
mod error;
#[path = "../../src/folder.rs"]
mod folder;
#[path = "../../src/header.rs"]
mod header;
#[path = "../../src/index.rs"]
mod index;
#[path = "../../src/list.rs"]
mod list;
mod model;
#[path = "../../src/rank_file.rs"]
mod rank_file;
#[path = "../../src/reader.rs"]
mod reader;
#[path = "../../src/runs.rs"]
mod runs;
mod sparse;
#[path = "../../src/sync.rs"]
mod sync;
#[path = "../../src/version1.rs"]
mod version1;
#[path = "../../src/writer.rs"]
mod writer;

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use block::{Block, Dtype, Late, Piece};
use error::CheckpointError;
use index::{INDEX, Index};
use list::{Layout, Told, merge};
use model::{Cut, Model, Tensor};
use reader::Checkpoint;
use runs::meeting;
use serde_json::json;

const ID: &str = "0123456789abcdef";

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let cases = [
        (model::TINY, 8),
        (model::LLAMA_70B, 1024),
        (model::LLAMA_70B, 16_384),
        (model::DEEPSEEK_671B, 1024),
        (model::DEEPSEEK_671B, 16_384),
    ];
    println!(
        "model cut ranks | tensors, pieces | list, layouts, sent to the first | list ms, index s, index | heads | open s | file s | \
         resumed by: find ms, files opened, seeks, read s and bytes of needed"
    );
    for (model, ranks) in cases {
        for cut in [Cut::Even, Cut::Dealt] {
            let name = [
                model.name.to_owned(),
                cut.name().to_owned(),
                ranks.to_string(),
            ];
            if words.iter().all(|word| name.contains(word)) {
                let folder =
                    std::env::temp_dir().join(format!("lowp-scale-{}", std::process::id()));
                fs::create_dir_all(&folder).expect("a folder");
                println!("{} | {}", name.join(" "), line(&model, cut, ranks, &folder));
                fs::remove_dir_all(&folder).expect("the folder");
            }
        }
    }
}

/// One line of the table.
fn line(model: &Model, cut: Cut, ranks: usize, folder: &Path) -> String {
    let tensors = model.tensors(cut);
    let first = |rank: usize| (rank == 0).then(|| (model::counts(), Block::whole([1, 16])));
    let of_rank = |rank: usize, ranks: usize| -> Vec<(Tensor, Block)> {
        let own = tensors.iter().filter_map(move |tensor| {
            let block = tensor.of_rank(rank, ranks)?;
            Some((tensor.clone(), block))
        });
        own.chain(first(rank)).collect()
    };
    // Who resumes: as many as saved, 16 fewer, half as many, and twice as many.
    let fewer = if ranks > 16 { ranks - 16 } else { ranks - 1 };
    let readers = [ranks, fewer, ranks / 2, 2 * ranks].map(|now| (now / 2, now));
    let sources: BTreeSet<usize> = readers
        .iter()
        .flat_map(|&(rank, now)| {
            (rank * ranks / now).saturating_sub(1)..=(rank + 1) * ranks / now + 1
        })
        .chain([0])
        .filter(|&rank| rank < ranks)
        .collect();

    // Ranks whose files are read later write them.
    let mut layouts: HashMap<u64, (Layout, usize)> = HashMap::new();
    let (mut told, mut heads, mut wrote) = (HashMap::new(), 0, Duration::ZERO);
    let mut lists = Duration::ZERO;
    for &rank in &sources {
        let mine = of_rank(rank, ranks);
        let begun = Instant::now();
        let (layout, blocks) = model::listed(&mine);
        lists += begun.elapsed();
        let begun = Instant::now();
        let (file, head) = sparse::write(folder, (rank, ID), &mine);
        wrote += begun.elapsed();
        heads = heads.max(head);
        let bytes = layout.to_bytes();
        let of_rank = Told::new(file, &bytes, blocks);
        layouts
            .entry(of_rank.layout)
            .or_insert((layout, bytes.len()));
        told.insert(rank, of_rank);
    }
    let files = sources.len() as u32;

    // All others only make their lists.
    let like = told[&sources
        .iter()
        .copied()
        .find(|&rank| rank > 0)
        .expect("two ranks")]
        .clone();
    let (kinds, mut sent, mut made) = (model::one_of_each_kind(&tensors), 0, Vec::new());
    for rank in 0..ranks {
        let of_rank = match told.remove(&rank) {
            Some(of_rank) => of_rank,
            None => {
                let file = like.file.clone();
                match cut {
                    Cut::Even => Told {
                        file,
                        blocks: kinds
                            .iter()
                            .map(|tensor| {
                                let block = tensor.of_rank(rank, ranks);
                                block
                                    .into_iter()
                                    .filter(|block| !block.is_empty())
                                    .collect()
                            })
                            .collect(),
                        ..like.clone()
                    },
                    Cut::Dealt => {
                        let (layout, blocks) = model::listed(&of_rank(rank, ranks));
                        let bytes = layout.to_bytes();
                        let of_rank = Told::new(file, &bytes, blocks);
                        layouts
                            .entry(of_rank.layout)
                            .or_insert((layout, bytes.len()));
                        of_rank
                    }
                }
            }
        };
        sent += postcard::to_stdvec(&of_rank).expect("a list").len();
        made.push(of_rank);
    }
    let list = postcard::to_stdvec(&made[ranks / 2]).expect("a list").len();
    let number = layouts.len();
    // The first rank has its own.
    sent += layouts.values().map(|(_, bytes)| bytes).sum::<usize>();
    let layouts = layouts
        .into_iter()
        .map(|(digest, (layout, _))| (digest, layout))
        .collect();

    // Files that nobody wrote are as long as their pieces ask for.
    let mut index = Index {
        id: ID.to_owned(),
        step: 1,
        files: made.iter().map(|told| told.file.clone()).collect(),
        kinds: Vec::new(),
        tensors: Default::default(),
        about: json!({}),
        checksums: None,
    };
    let begun = Instant::now();
    (index.kinds, index.tensors) = merge(&made, &layouts).expect("tensors");
    drop(made);
    for (rank, held) in index.held().expect("pieces").into_iter().enumerate() {
        if !sources.contains(&rank) {
            index.files[rank].bytes = held.bytes + 8 * held.chunks + 8 + 1000;
        }
    }
    index.check().expect("an index that makes sense");
    let text = index.render().expect("a text");
    let index_time = begun.elapsed();
    let path = folder.join(INDEX);
    fs::write(&path, &text).expect("room");

    let begun = Instant::now();
    Checkpoint::open(folder).expect("a checkpoint");
    let opened = begun.elapsed();
    let mut resumed = String::new();
    for (rank, now) in readers {
        let wanted = of_rank(rank, now);
        let begun = Instant::now();
        let files: BTreeSet<usize> = wanted
            .iter()
            .filter_map(|(tensor, block)| Some(meeting(&index.kind(&tensor.name)?.runs, *block)))
            .flatten()
            .map(|(rank, _)| rank)
            .collect();
        let find = begun.elapsed();
        drop(black_box(files));
        let checkpoint = Checkpoint::open(folder).expect("a checkpoint");
        let begun = Instant::now();
        let mut bytes = 0;
        for (
            Tensor {
                name, dtype, full, ..
            },
            block,
        ) in &wanted
        {
            let read = checkpoint.read(name, *dtype, *full, *block);
            bytes += black_box(read.expect("a block")).len();
        }
        let read = begun.elapsed();
        resumed += &format!(
            "; {now}: {:.0}, {}, {}, {:.2} and {} of {}",
            1e3 * find.as_secs_f64(),
            checkpoint.reads().opens,
            checkpoint.reads().seeks,
            read.as_secs_f64(),
            shown(checkpoint.reads().bytes),
            shown(bytes)
        );
    }
    format!(
        "{}, {} | {}, {number}, {} | {:.1}, {:.2}, {} | {} | {:.2} | {:.2} | {}",
        tensors.len() + 1,
        index.pieces(),
        shown(list),
        shown(sent),
        1e3 * lists.as_secs_f64() / f64::from(files),
        index_time.as_secs_f64(),
        shown(text.len()),
        shown(heads),
        opened.as_secs_f64(),
        wrote.as_secs_f64() / f64::from(files),
        resumed.trim_start_matches("; ")
    )
}

/// Bytes with their unit.
fn shown(bytes: usize) -> String {
    let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    let unit = units.into_iter().find(|(unit, _)| bytes >= *unit);
    unit.map_or_else(
        || format!("{bytes} B"),
        |(unit, name)| format!("{:.1} {name}", bytes as f64 / unit as f64),
    )
}

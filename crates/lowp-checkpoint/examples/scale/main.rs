//! Checkpoints of 70b and 671b parameters over 1,024 and 16,384 ranks: the real code, and files without data.
//!
//! `cargo run --release -p lowp-checkpoint --example scale`; words after `--` choose lines: `-- 70b even 1024`. Ranks make their lists, the
//! first one the index; a few ranks write their files, whose entries are zeros that take no room on the disk, and a few resume. Where ranks
//! have the same tensors, some make their lists from all of their pieces, and the others from one tensor of each kind.

#![expect(
    dead_code,
    unreachable_pub,
    reason = "the modules of the crate, of which only some functions are called"
)]

#[path = "../../src/block.rs"]
mod block;
#[path = "../../src/document.rs"]
mod document;
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
#[path = "../../src/spans.rs"]
mod spans;
mod sparse;
#[path = "../../src/sync.rs"]
mod sync;
#[path = "../../src/unfinished.rs"]
mod unfinished;
#[path = "../../src/version1.rs"]
mod version1;
#[path = "../../src/writer.rs"]
mod writer;

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::hint::black_box;
use std::path::Path;

use block::{Block, Dtype, Late, Piece};
use error::CheckpointError;
use index::{FileRecord, INDEX, Index};
use list::{RankReport, Table, merge};
use model::{Cut, Model, Tensor};
use reader::Checkpoint;
use serde_json::json;
use spans::meeting;

const ID: &str = "0123456789abcdef";
/// Most files that a rank which resumes here reads, and the most bytes of them.
const MOST: (usize, u64) = (4, 10 << 30);

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
        "model cut ranks | tensors, pieces | list, tables, sent to the first | list ms, index s, index | heads | open s | file s | \
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

/// One line of what is printed.
fn line(model: &Model, cut: Cut, ranks: usize, folder: &Path) -> String {
    let tensors = model.tensors(cut);
    let of_rank = |rank: usize, ranks: usize| -> Vec<(Tensor, Block)> {
        let own = tensors.iter().filter_map(|tensor| {
            let block = tensor.of_rank(rank, ranks)?;
            Some((tensor.clone(), block))
        });
        let first = (rank == 0).then(|| (model::counts(), Block::whole([1, 16])));
        own.chain(first).collect()
    };

    // The list of each rank: where all have the same tensors, of one tensor of each kind for most of them.
    let mut tables: HashMap<u64, (Table, usize)> = HashMap::new();
    let kinds = model::one_of_each_kind(&tensors, ranks);
    let (mut reports, mut sent, mut longest) = (Vec::<RankReport>::new(), 0, 0.0f64);
    for rank in 0..ranks {
        let whole = cut == Cut::Dealt || rank < 2 || rank.is_power_of_two();
        let of_rank = if whole {
            let parts = of_rank(rank, ranks);
            let begun = seconds();
            let (table, blocks) = model::listed(&parts);
            let bytes = table.to_bytes();
            longest = longest.max(seconds() - begun);
            let of_rank = RankReport::new(record(1 << 30), &bytes, blocks);
            tables.entry(of_rank.table).or_insert((table, bytes.len()));
            of_rank
        } else {
            let block = |tensor: &&Tensor| {
                let block = tensor.of_rank(rank, ranks);
                block
                    .into_iter()
                    .filter(|block| !block.is_empty())
                    .collect()
            };
            let blocks = kinds.iter().map(block).collect();
            RankReport {
                blocks,
                ..reports[1].clone()
            }
        };
        sent += postcard::to_stdvec(&of_rank).expect("a list").len();
        reports.push(of_rank);
    }
    let list = postcard::to_stdvec(&reports[ranks / 2])
        .expect("a list")
        .len();
    let number = tables.len();
    sent += tables.values().map(|(_, bytes)| bytes).sum::<usize>();
    let tables = tables.into_iter();
    let tables = tables.map(|(digest, (table, _))| (digest, table)).collect();

    let begun = seconds();
    let (kinds, numbers) = merge(&reports, &tables).expect("tensors");
    let mut merged = seconds() - begun;
    drop((reports, tables));
    let mut index = Index {
        id: ID.to_owned(),
        step: 1,
        files: vec![record(0); ranks],
        kinds,
        tensors: numbers,
        about: json!({}),
        checksums: None,
    };
    // Files that nobody reads here are as long as their pieces ask for.
    for (rank, held) in index.held().expect("pieces").into_iter().enumerate() {
        index.files[rank].bytes = held.bytes + 8 * held.chunks + 8 + 1000;
    }

    // Who resumes, the middle one of each world, and from which files.
    let fewer = if ranks > 16 { ranks - 16 } else { ranks - 1 };
    let worlds = [ranks, fewer, ranks / 2, 2 * ranks];
    let readers = worlds.map(|world| {
        let wanted = of_rank(world / 2, world);
        let begun = seconds();
        let of = |(tensor, block): &(Tensor, Block)| {
            let kind = index.kind(&tensor.name).expect("a tensor");
            meeting(&kind.spans, *block)
        };
        let files: BTreeSet<usize> = wanted.iter().flat_map(of).map(|(rank, _)| rank).collect();
        (world, wanted, files, seconds() - begun)
    });
    let lengths: Vec<u64> = index.files.iter().map(|file| file.bytes).collect();
    let reads = |files: &BTreeSet<usize>| {
        let bytes: u64 = files.iter().map(|&rank| lengths[rank]).sum();
        files.len() <= MOST.0 && bytes <= MOST.1
    };
    let read = readers.iter().filter(|reader| reads(&reader.2));
    let written: BTreeSet<usize> = read.flat_map(|reader| &reader.2).copied().collect();
    let (mut heads, mut wrote) = (0, 0.0);
    for &rank in &written {
        let parts = of_rank(rank, ranks);
        let begun = seconds();
        let (file, head) = sparse::write(folder, (rank, ID), &parts);
        wrote += seconds() - begun;
        heads = heads.max(head);
        index.files[rank] = file;
    }
    let begun = seconds();
    index.check().expect("an index that makes sense");
    let text = index.render().expect("a text");
    merged += seconds() - begun;
    fs::write(folder.join(INDEX), &text).expect("room");

    let begun = seconds();
    Checkpoint::open(folder).expect("a checkpoint");
    let opened = seconds() - begun;
    let resumed = readers.map(|(world, wanted, files, find)| {
        let begin = format!("{world}: {:.0}, {}", 1e3 * find, files.len());
        if !reads(&files) {
            return begin;
        }
        let checkpoint = Checkpoint::open(folder).expect("a checkpoint");
        let (begun, mut bytes) = (seconds(), 0);
        for (tensor, block) in &wanted {
            let read = checkpoint.read(&tensor.name, tensor.dtype, tensor.full, *block);
            bytes += black_box(read.expect("a block")).len();
        }
        let took = seconds() - begun;
        let reads = checkpoint.reads();
        assert_eq!(reads.opens, files.len(), "it opens what it needs");
        let (read, needed) = (shown(reads.bytes), shown(bytes));
        format!("{begin}, {}, {took:.2} and {read} of {needed}", reads.seeks)
    });
    format!(
        "{}, {} | {}, {number}, {} | {:.1}, {merged:.2}, {} | {} | {opened:.3} | {:.2} | {}",
        index.tensors.len(),
        index.pieces(),
        shown(list),
        shown(sent),
        1e3 * longest,
        shown(text.len()),
        shown(heads),
        wrote / written.len() as f64,
        resumed.join("; ")
    )
}

/// That of a file which nobody reads here.
fn record(bytes: u64) -> FileRecord {
    let checksum = ID.to_owned();
    FileRecord { bytes, checksum }
}

/// Seconds that this thread had a core: others use the machine, too.
fn seconds() -> f64 {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = text
        .split(' ')
        .next()
        .and_then(|word| word.parse::<f64>().ok());
    nanoseconds.unwrap_or(f64::NAN) / 1e9
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

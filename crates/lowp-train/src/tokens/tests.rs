//! Tokens from files of each kind, and how they are packed.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::*;
use crate::data::Data;

const PACKING: Packing = Packing {
    seq: 8,
    batch: 4,
    held_out: 0.2,
    mask_documents: false,
};

/// The id of place `at`, which no place nearby has.
fn id(at: u64) -> u32 {
    (at * 7919 % 60_000) as u32
}

/// Documents of 1 to 12 tokens; every third token counts where they are masked.
fn folder(vocab: usize, masked: bool) -> (TempDir, Vec<u32>, Vec<u64>) {
    let folder = tempfile::tempdir().expect("a folder");
    let ids = TokenIds {
        vocab,
        end: Some(3),
    };
    let writer = TokenWriter::new(folder.path(), ids, masked, String::new());
    let mut writer = writer.expect("a writer").shards_of(40);
    let (mut all, mut starts) = (Vec::new(), Vec::new());
    for document in 0..60u64 {
        let ids: Vec<u32> = (0..document % 12 + 1)
            .map(|at| id(100 * document + at))
            .collect();
        let counted: Vec<bool> = (0..ids.len()).map(|at| at % 3 == 0).collect();
        writer.document(&ids, &counted).expect("a document");
        starts.extend(vec![all.len() as u64; ids.len() + 1]);
        all.extend(ids);
        all.push(3);
    }
    let index = writer.finish().expect("an index");
    assert_eq!((index.tokens, index.documents), (all.len() as u64, 60));
    assert!(index.shards.len() > 5);
    (folder, all, starts)
}

fn megatron(folder: &Path, ids: &[u32], lengths: &[usize]) -> PathBuf {
    let path = folder.join("data");
    let bytes: Vec<u8> = ids
        .iter()
        .flat_map(|&id| (id as u16).to_le_bytes())
        .collect();
    fs::write(folder.join("data.bin"), bytes).expect("a file");
    let mut index = b"MMIDIDX\x00\x00".to_vec();
    index.extend(1u64.to_le_bytes());
    index.push(8);
    index.extend((lengths.len() as u64).to_le_bytes());
    index.extend((lengths.len() as u64 + 1).to_le_bytes());
    index.extend(
        lengths
            .iter()
            .flat_map(|&length| (length as u32).to_le_bytes()),
    );
    index.extend(vec![0; 8 * lengths.len()]);
    index.extend((0..=lengths.len() as u64).flat_map(u64::to_le_bytes));
    fs::write(folder.join("data.idx"), index).expect("a file");
    path
}

fn npy(folder: &Path, ids: &[u32]) -> PathBuf {
    let path = folder.join("ids.npy");
    let header = format!(
        "{{'descr': '<i4', 'fortran_order': False, 'shape': ({},), }}",
        ids.len()
    );
    let header = format!("{header:<117}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.bytes());
    bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
    fs::write(&path, bytes).expect("a file");
    path
}

#[test]
fn ids_are_those_of_the_files() {
    for vocab in [60_000, 70_000] {
        let (folder, all, _) = folder(vocab, false);
        let places = [
            folder.path().to_owned(),
            npy(folder.path(), &all),
            megatron(folder.path(), &all, &[all.len() - 5, 5]),
        ];
        for place in places {
            assert!(Tokens::are_at(&place));
            let tokens = Tokens::open(&place, PACKING).expect("tokens");
            let len = all.len() as u64;
            for (from, to) in [(0, len), (39, 43), (1, 2), (len - 1, len), (60, 200)] {
                let expected = &all[from as usize..to as usize];
                assert_eq!(tokens.ids(from..to).expect("ids"), expected);
            }
        }
        assert!(!Tokens::are_at(&folder.path().join("tokens-00000.ends")));
    }
}

/// An epoch has each sequence once, and the splits have none in common.
#[test]
fn an_epoch_is_all_sequences() {
    let (folder, all, _) = folder(60_000, false);
    let tokens = Tokens::open(folder.path(), PACKING).expect("tokens");
    let [train, held_out] = tokens.split();
    assert_eq!(train + held_out, (all.len() as u64 - 1) / 8);
    for epoch in 0..3u64 {
        let places = epoch * train..(epoch + 1) * train;
        let mut seen: Vec<u64> = places.map(|at| tokens.in_order(5, 0, at)).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..train).collect::<Vec<_>>());
    }
    let validation: Vec<u64> = (0..20).map(|at| tokens.held_out(20, at)).collect();
    assert!(
        validation
            .iter()
            .all(|at| (train..train + held_out).contains(at))
    );
}

/// Whatever ranks and micro-batches it is cut over.
#[test]
fn a_batch_is_its_parts() {
    let (folder, ..) = folder(60_000, true);
    for mask_documents in [false, true] {
        let packing = Packing {
            mask_documents,
            ..PACKING
        };
        let open = |weight| {
            let tokens = Tokens::open(folder.path(), packing).expect("tokens");
            (tokens, weight)
        };
        let tokens = Mixture::new(vec![open(3.0), open(1.0)]).expect("a mixture");
        let whole = tokens.train(1, 9, 0..4).expect("a batch");
        let parts: Vec<Batch> = [0..1, 1..4]
            .map(|range| tokens.train(1, 9, range).expect("a part"))
            .into();
        let concat = |of: fn(&Batch) -> &[u32]| parts.iter().flat_map(of).copied().collect();
        let inputs: Vec<u32> = concat(|part| &part.inputs);
        let targets: Vec<u32> = concat(|part| &part.targets);
        assert_eq!((&*whole.inputs, &*whole.targets), (&*inputs, &*targets));
        let counted = targets.iter().filter(|&&id| id != Batch::IGNORED).count();
        assert_eq!(tokens.targets(1, 9, 4).expect("a count"), counted);
        assert!(counted < targets.len());
    }
}

/// A token sees its own document, and nothing predicts the first token of one.
#[test]
fn documents_are_apart() {
    let (folder, all, starts) = folder(60_000, false);
    let packing = Packing {
        mask_documents: true,
        ..PACKING
    };
    let tokens = Tokens::open(folder.path(), packing).expect("tokens");
    for sequence in 0..20u64 {
        let batch = tokens.batch(sequence).expect("a batch");
        let seen = batch.first_seen.expect("first positions");
        for place in 0..8u64 {
            let at = (8 * sequence + place) as usize;
            let expected = starts[at].saturating_sub(8 * sequence);
            assert_eq!(u64::from(seen[place as usize]), expected);
            let target = match starts[at + 1] == at as u64 + 1 {
                true => Batch::IGNORED,
                false => all[at + 1],
            };
            assert_eq!(batch.targets[place as usize], target);
        }
    }
}

/// Each source has its share of the sequences from the first on, and all of its own in their order, whatever batches they are in.
#[test]
fn sources_have_their_shares() {
    let (folder, ..) = folder(60_000, false);
    for weights in [
        &[1.0][..],
        &[0.7, 0.3],
        &[1.0, 1.0, 2.0],
        &[1e-6, 5.0, 0.1, 3.0],
        &[1e20, 1.0, 1.0],
        &[1e-320, 1e-320, 2e-320],
    ] {
        let open = |&weight| {
            let tokens = Tokens::open(folder.path(), PACKING).expect("tokens");
            (tokens, weight)
        };
        let mixture = Mixture::new(weights.iter().map(open).collect()).expect("a mixture");
        let mut counts = vec![0; weights.len()];
        for number in 0..2000u64 {
            let (source, own) = mixture.place(number);
            assert_eq!(own, counts[source], "{weights:?}, {number}");
            counts[source] += 1;
            for (index, (_, share)) in mixture.sources().enumerate() {
                let expected = share * (number + 1) as f64;
                let off = (counts[index] as f64 - expected).abs();
                assert!(
                    off <= weights.len() as f64,
                    "{weights:?}, {number}: {counts:?}"
                );
                assert_eq!(mixture.count(index, number + 1), counts[index]);
            }
        }
    }
}

/// Of the same file, two sources have orders of their own, and the first one that of the file alone.
#[test]
fn a_mixture_is_its_sources() {
    let (folder, ..) = folder(60_000, false);
    let open = || Tokens::open(folder.path(), PACKING).expect("tokens");
    let alone = Mixture::from(open());
    let both = Mixture::new(vec![(open(), 1.0), (open(), 1.0)]).expect("a mixture");
    let sequences = |mixture: &Mixture, steps: usize| -> Vec<Vec<u32>> {
        let batch = |step| mixture.train(3, step, 0..4).expect("a batch").inputs;
        let inputs: Vec<u32> = (0..steps).flat_map(|step| batch(step).to_vec()).collect();
        inputs.chunks(8).map(<[u32]>::to_vec).collect()
    };
    let all = sequences(&both, 2);
    let of = |source| {
        let numbers = (0..8u64).filter(|&at| both.place(at).0 == source);
        numbers
            .map(|at| all[at as usize].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(of(0), sequences(&alone, 1));
    assert_ne!(of(0), of(1));
    assert_eq!(both.sequences(), alone.sequences().map(|all| 2 * all));
    // Other weights are other data.
    let other = Mixture::new(vec![(open(), 1.0), (open(), 2.0)]).expect("a mixture");
    assert_ne!(both.digest(), other.digest());
    // The same shares are the same data, however they are written.
    let thirds = |scale: f64| {
        let sources = [0.6, 0.3, 0.1].map(|weight| (open(), weight * scale));
        Mixture::new(sources.into()).expect("a mixture").digest()
    };
    assert_eq!(thirds(1.0), thirds(10.0));
    let error = Mixture::new(vec![(open(), 1e308), (open(), 1e308)]).expect_err("a sum");
    assert!(error.to_string().contains("too large"), "{error}");
    // Every source has sequences, if few.
    let rare = Mixture::new(vec![(open(), 1e20), (open(), 1.0), (open(), 1.0)]).expect("sources");
    assert_eq!([1, 2].map(|index| rare.count(index, 1 << 34)), [2, 2]);
    for weight in [0.0, -1.0, f64::NAN] {
        let error = Mixture::new(vec![(open(), weight)]).expect_err("a weight");
        assert!(
            error.to_string().contains("expected a positive number"),
            "{error}"
        );
    }
}

#[test]
fn what_cannot_be_read_is_named() {
    let (folder, all, _) = folder(60_000, false);
    let short = Packing {
        seq: all.len(),
        ..PACKING
    };
    let path = npy(folder.path(), &all);
    let error = |path: &Path, packing| {
        let error = Tokens::open(path, packing).expect_err("an error");
        error.to_string()
    };
    assert!(error(&path, short).contains("too few for `seq`"));
    let bytes = fs::read(&path).expect("a file");
    fs::write(&path, &bytes[..bytes.len() - 1]).expect("a file");
    assert!(error(&path, PACKING).contains("too few for"));
    fs::write(&path, b"no array").expect("a file");
    assert!(error(&path, PACKING).contains("cannot read"));
    let data = megatron(folder.path(), &all, &[all.len() + 1]);
    assert!(error(&data, PACKING).contains("too few for"));
    fs::remove_file(folder.path().join("tokens-00003.bin")).expect("removed");
    assert!(error(folder.path(), PACKING).contains("tokens-00003.bin"));
}

/// What a run trains on is the same where its ids, and the masks and ends that it uses, are.
#[test]
fn other_masks_and_ends_are_other_data() {
    let (folder, all, _) = folder(60_000, true);
    let digest = |mask_documents| {
        let packing = Packing {
            mask_documents,
            ..PACKING
        };
        let tokens = Tokens::open(folder.path(), packing).expect("tokens");
        Mixture::from(tokens).digest()
    };
    let change = |file: &str, from: &[u8], to: &[u8]| {
        let path = folder.path().join(file);
        let bytes = fs::read(&path).expect("a file");
        let at = bytes.windows(from.len()).position(|part| part == from);
        let at = at.expect("bytes to change");
        fs::write(&path, [&bytes[..at], to, &bytes[at + to.len()..]].concat()).expect("a file");
    };
    let same = [false, true].map(digest);
    assert_eq!([false, true].map(digest), same);
    assert_ne!(same[0], same[1]);

    change("tokens-00002.mask", &[1, 0, 0], &[1, 1, 0]);
    let masked = [false, true].map(digest);
    assert!(masked[0] != same[0] && masked[1] != same[1]);
    // Another byte that is not zero says the same.
    change("tokens-00002.mask", &[1, 1, 0], &[1, 7, 0]);
    assert_eq!([false, true].map(digest), masked);

    let ends = fs::read(folder.path().join("tokens-00001.ends")).expect("ends");
    let moved = (u64::from_le_bytes(*ends.first_chunk().expect("an end")) + 1).to_le_bytes();
    change("tokens-00001.ends", &ends[..8], &moved);
    assert_eq!(digest(false), masked[0]);
    assert_ne!(digest(true), masked[1]);
    assert!(all.len() < 1 << 16);
}

/// Files of a folder have the lengths that the index says, to the byte.
#[test]
fn files_that_the_index_does_not_fit_are_errors() {
    let (folder, ..) = folder(60_000, true);
    let path = |file: &str| folder.path().join(file);
    let error = || {
        let error = Tokens::open(folder.path(), PACKING).expect_err("an error");
        error.to_string()
    };
    for (file, why) in [
        ("tokens-00001.bin", "tokens take"),
        ("tokens-00001.ends", "no multiple of 8"),
        ("tokens-00001.mask", "bytes for"),
    ] {
        let bytes = fs::read(path(file)).expect("a file");
        fs::write(path(file), [&bytes[..], &[0]].concat()).expect("a file");
        let found = error();
        assert!(found.contains(file) && found.contains(why), "{found}");
        fs::write(path(file), &bytes).expect("a file");
    }
    let file = "tokens-00001.ends";
    let bytes = fs::read(path(file)).expect("a file");
    fs::write(path(file), &bytes[..bytes.len() - 8]).expect("a file");
    let found = error();
    assert!(found.contains("its last document ends at"), "{found}");
    fs::write(path(file), &bytes).expect("a file");
    Tokens::open(folder.path(), PACKING).expect("tokens");
}

/// The vocabulary says which ids there may be, and the largest one which there are.
#[test]
fn the_largest_id_is_that_of_the_tokens() {
    let (folder, all, _) = folder(70_000, false);
    let tokens = Tokens::open(folder.path(), PACKING).expect("tokens");
    assert_eq!(tokens.largest(), all.iter().copied().max());

    // Of the token after documents, too.
    let folder = tempfile::tempdir().expect("a folder");
    // The name of a draft that was left there is nothing to trip over.
    fs::create_dir(folder.path().join("tokens.json.part")).expect("a folder");
    let ids = TokenIds {
        vocab: 9,
        end: Some(7),
    };
    let writer = TokenWriter::new(folder.path(), ids, false, String::new());
    let mut writer = writer.expect("a writer");
    writer.document(&[1, 2], &[]).expect("a document");
    let index = writer.finish().expect("an index");
    assert_eq!((index.vocab, index.largest), (9, Some(7)));
}

#[test]
fn documents_that_cannot_be_apart_are_errors() {
    let folder = tempfile::tempdir().expect("a folder");
    let ids: Vec<u32> = (0..90).map(id).collect();
    let apart = Packing {
        mask_documents: true,
        ..PACKING
    };
    let error = Tokens::open(&npy(folder.path(), &ids), apart).expect_err("no ends");
    assert!(error.to_string().contains("where documents end"), "{error}");

    let path = megatron(folder.path(), &ids, &[30, 30, 30]);
    Tokens::open(&path, apart).expect("tokens");
    let index = folder.path().join("data.idx");
    let mut bytes = fs::read(&index).expect("an index");
    // The last four numbers say which sequences documents begin with.
    let begin = bytes.len() - 4 * 8;
    bytes[begin + 8] = 2;
    bytes[begin + 16] = 1;
    fs::write(&index, bytes).expect("an index");
    let error = Tokens::open(&path, apart).expect_err("no order");
    let why = "document 2 begins at token 30, the one before it at 60";
    assert!(error.to_string().contains(why), "{error}");
}

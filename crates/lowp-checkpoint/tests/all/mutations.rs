//! Indexes and headers that somebody changed, with the checksum that they need: opened and read, or an error that names the folder. None
//! panics, and none asks for more memory than the files have bytes. `LOWP_EXHAUSTIVE=1` tries a million of them.

use std::fs;
use std::path::Path;
use std::time::Duration;

use lowp_checkpoint::{
    Block, Checkpoint, CheckpointError, Dtype, Piece, Saver, checksum, folder_of,
};
use lowp_comm::threads;
use serde_json::{Value, json};

/// Random numbers that are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 16).unwrap_or(0) % n.max(1)
    }
}

/// Values at the edges of what an index holds.
fn value(random: &mut Random) -> Value {
    let numbers = [
        0,
        1,
        2,
        3,
        5,
        40,
        66,
        1 << 31,
        1 << 32,
        1 << 53,
        1 << 63,
        u64::MAX,
    ];
    match random.below(16) {
        0 => json!(-1),
        1 => json!(1.5),
        2 => Value::Null,
        3 => json!("../rank-00000.safetensors"),
        4 => json!("F32"),
        5 => json!("U8"),
        6 => json!([]),
        7 => json!({}),
        _ => json!(numbers[random.below(numbers.len())]),
    }
}

/// All places in `value`.
fn places(value: &Value, path: &str, all: &mut Vec<String>) {
    all.push(path.to_owned());
    let part = |key: &str| key.replace('~', "~0").replace('/', "~1");
    match value {
        Value::Object(object) => object
            .iter()
            .for_each(|(key, value)| places(value, &format!("{path}/{}", part(key)), all)),
        Value::Array(array) => array
            .iter()
            .enumerate()
            .for_each(|(at, value)| places(value, &format!("{path}/{at}"), all)),
        _ => {}
    }
}

/// Changes `document` in one place or a few: other values, parts moved, doubled, taken out or put under other names.
fn change(document: &mut Value, random: &mut Random) {
    for _ in 0..=random.below(8) / 5 {
        let mut all = Vec::new();
        places(document, "", &mut all);
        let [at, from] = [(); 2].map(|()| all[random.below(all.len())].clone());
        let other = match random.below(3) {
            0 => document.pointer(&from).cloned().unwrap_or_default(),
            _ => value(random),
        };
        let near = random.below(3);
        let Some(place) = document.pointer_mut(&at) else {
            continue;
        };
        match place {
            Value::Number(number) if near > 0 => {
                let by = [1, 8, 1 << 40][random.below(3)];
                *place = match (number.as_u64(), near) {
                    (Some(number), 1) => json!(number.wrapping_add(by)),
                    (Some(number), _) => json!(number.wrapping_sub(by)),
                    _ => other,
                };
            }
            Value::Object(object) if near > 0 && !object.is_empty() => {
                let key = object
                    .keys()
                    .nth(random.below(object.len()))
                    .cloned()
                    .unwrap_or_default();
                match near {
                    1 => drop(object.remove(&key)),
                    _ => drop(object.insert(
                        ["x", "rows", "rank-00001.safetensors"][random.below(3)].to_owned(),
                        other,
                    )),
                }
            }
            Value::Array(array) if near > 0 && !array.is_empty() => {
                let at = random.below(array.len());
                match near {
                    1 => drop(array.remove(at)),
                    _ => array.push(array[at].clone()),
                }
            }
            place => *place = other,
        }
    }
}

/// A checkpoint of two ranks in `folder`.
fn save(folder: &Path) {
    std::thread::scope(|scope| {
        for (rank, control) in threads(2, Duration::from_secs(60)).into_iter().enumerate() {
            scope.spawn(move || {
                let mut saver = Saver::new(control, folder, None).expect("a folder");
                let piece = |name: &str, dtype: Dtype, full: [usize; 2], axis: usize| {
                    let mut block = Block::whole(full);
                    block.shape[axis] = full[axis] / 2;
                    block.start[axis] = rank * block.shape[axis];
                    let bytes = vec![rank as u8; block.shape[0] * block.shape[1] * dtype.bytes()];
                    Piece {
                        name: name.to_owned(),
                        dtype,
                        full,
                        block,
                        bytes,
                    }
                };
                let pieces = vec![
                    piece("rows", Dtype::U8, [6, 5], 0),
                    piece("a/cols~", Dtype::U8, [3, 8], 1),
                    piece("flat", Dtype::F32, [1, 20], 1),
                    piece("none", Dtype::F32, [0, 4], 1),
                ];
                saver
                    .start(1, pieces, json!({ "recipe": "x", "config": { "lr": 0.1 } }))
                    .expect("a start");
                saver.finish().expect("a checkpoint");
            });
        }
    });
}

/// A safetensors file with a changed header, and the data that it had.
fn with_header(good: &[u8], random: &mut Random) -> Vec<u8> {
    let length = u64::from_le_bytes(*good.first_chunk().expect("a length"));
    let length = usize::try_from(length).expect("a length");
    let mut header: Value = serde_json::from_slice(&good[8..8 + length]).expect("a header");
    change(&mut header, random);
    let header = header.to_string();
    let stated = match random.below(20) {
        0 => header.len() as u64 + 1,
        1 => u64::MAX,
        _ => header.len() as u64,
    };
    [
        &stated.to_le_bytes()[..],
        header.as_bytes(),
        &good[8 + length..],
    ]
    .concat()
}

#[test]
fn changed_checkpoints_are_read_or_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    save(folder.path());
    let step = folder_of(folder.path(), 1);
    let (index_path, rank_path) = (step.join("index.json"), step.join("rank-00001.safetensors"));
    let good_index = fs::read_to_string(&index_path).expect("an index");
    let good_rank = fs::read(&rank_path).expect("a file");
    let document: Value = serde_json::from_str(&good_index).expect("JSON");
    // The pieces of the rank: three rows, a half and no entries, in bytes and numbers.
    let data = 3 * 5 + 3 * 4 + 10 * 4;
    let exhaustive = std::env::var_os("LOWP_EXHAUSTIVE").is_some_and(|value| value == "1");
    let rounds = if exhaustive { 1_000_000 } else { 1000 };
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut whole = 0;
    for round in 0..rounds {
        let mut changed = document.clone();
        let of_rank = round % 4 == 0;
        if of_rank {
            let bytes = with_header(&good_rank, &mut random);
            // What the index says of the file is mended, too, or nothing else would be looked at.
            changed["index"]["files"][1]["bytes"] = json!(bytes.len());
            let head = bytes.len() - data;
            changed["index"]["files"][1]["checksum"] = json!(checksum(&bytes[..head]));
            fs::write(&rank_path, bytes).expect("a file");
        } else if random.below(50) == 0 {
            change(&mut changed, &mut random);
        } else {
            change(&mut changed["index"], &mut random);
        }
        let index = changed["index"].to_string();
        if let Some(sum) = changed.get_mut("checksum") {
            *sum = json!(checksum(index.as_bytes()));
        }
        fs::write(&index_path, changed.to_string()).expect("a file");
        let check = |error: CheckpointError| {
            let text = error.to_string();
            let place = folder.path().display().to_string();
            assert!(text.contains(&place), "{index}: {text}");
            assert!(text.len() < 4096, "{text}");
        };
        let found = Checkpoint::latest(folder.path()).and_then(|checkpoint| {
            checkpoint.check_files()?;
            Ok(checkpoint)
        });
        match found {
            Err(error) => check(error),
            Ok(checkpoint) => {
                let on_disk: u64 = ["rank-00000.safetensors", "rank-00001.safetensors"]
                    .map(|name| fs::metadata(step.join(name)).map_or(0, |found| found.len()))
                    .iter()
                    .sum();
                let bytes = |[rows, cols]: [usize; 2], dtype: Dtype| rows * cols * dtype.bytes();
                let all: usize = checkpoint
                    .tensors()
                    .map(|tensor| bytes(tensor.shape, tensor.dtype))
                    .sum();
                assert!(all as u64 <= on_disk, "{index}: {all} bytes of {on_disk}");
                match checkpoint.verify() {
                    Ok(()) => whole += 1,
                    Err(error) => check(error),
                }
                for tensor in checkpoint.tensors() {
                    let whole = Block::whole(tensor.shape);
                    let mut inner = whole;
                    inner.shape[1] /= 2;
                    for block in [whole, inner] {
                        let read = checkpoint.read(tensor.name, tensor.dtype, tensor.shape, block);
                        match read {
                            Ok(read) => assert_eq!(read.len(), bytes(block.shape, tensor.dtype)),
                            Err(error) => check(error),
                        }
                    }
                }
            }
        }
        if of_rank {
            fs::write(&rank_path, &good_rank).expect("a file");
        }
    }
    // Changes that are always found at the first look would test the first look only.
    assert!(
        (rounds / 50..rounds / 2).contains(&whole),
        "{whole} of {rounds} were read"
    );
}

//! Files that are written to while they are read: an error, and no values of two states.

use crate::common::{SHAPE, plain, quantized, setup};
use lowp_file::export::ExportTarget;
use lowp_file::ranks::shard;
use lowp_file::select::Choices;
use lowp_file::{Export, Hub, Model, Out, Progress};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

const CHANGED: &str = "it was changed while it was read";

/// Says that `path` was written to, and leaves its bytes.
fn touch(path: &Path) {
    let file = File::options().write(true).open(path).expect("a file");
    let later = SystemTime::now() + Duration::from_secs(60);
    file.set_modified(later).expect("another time");
}

#[test]
fn values_of_a_file_that_changed_are_no_values() {
    let folder = tempfile::tempdir().expect("a folder");
    for path in [
        quantized(folder.path(), "mxfp8"),
        plain(folder.path(), "in.safetensors"),
    ] {
        let model = Model::open(&path).expect("a model");
        model.decode("a.weight").expect("values");
        touch(&path);
        let error = model.decode("a.weight").expect_err(CHANGED).to_string();
        assert!(error.contains(CHANGED), "{error}");
        // Also where something else is wrong, which may follow from it.
        let error = model.decode("c.weight").expect_err(CHANGED).to_string();
        assert!(error.contains(CHANGED), "{error}");
    }
}

/// A file of one rank has the values of that rank's rows.
#[test]
fn values_of_a_rank_file_are_those_of_its_rows() {
    let folder = tempfile::tempdir().expect("a folder");
    let hub = Hub::open(&plain(folder.path(), "in.safetensors")).expect("a model");
    let choices = Choices::new(&hub.model, &setup("mxfp8"), |_| true).expect("choices");
    let ranks = folder.path().join("ranks");
    shard(&hub, &choices, 2, &ranks, &()).expect("rank files");
    let whole = quantized(folder.path(), "mxfp8");
    let whole = Model::open(&whole).and_then(|model| model.decode("a.weight"));
    let mut parts = Vec::new();
    for rank in 0..2 {
        let path = ranks.join(format!("rank-{rank:05}-of-00002.safetensors"));
        let part = Model::open(&path).and_then(|model| model.decode("a.weight"));
        let part = part.expect("values");
        assert_eq!(part.len(), SHAPE[0] * SHAPE[1] / 2);
        parts.extend(part);
    }
    assert_eq!(parts, whole.expect("values"));
}

/// Touches the input when the work begins, and takes the output's place away.
#[derive(Debug)]
struct Meddling {
    input: PathBuf,
    output: PathBuf,
}

impl Progress for Meddling {
    fn begin(&self, _: usize) {
        touch(&self.input);
        fs::remove_dir_all(&self.output).expect("a folder");
    }

    fn add(&self, _: usize) {}
}

/// An input that was changed is reported as such, whatever failed because of it.
#[test]
fn an_export_of_a_file_that_changed_says_so() {
    let folder = tempfile::tempdir().expect("a folder");
    let input = quantized(folder.path(), "mxfp8");
    let hub = Hub::open(&input).expect("a model");
    let export = Export::of_model(&hub, ExportTarget::CompressedTensors).expect("an export");
    let output = folder.path().join("outputs");
    fs::create_dir(&output).expect("a folder");
    let progress = Meddling {
        input,
        output: output.clone(),
    };
    let error = export.write(&output.join("out"), Out::MOST_BYTES, &progress);
    let error = error.map(drop).expect_err(CHANGED).to_string();
    assert!(error.contains(CHANGED), "{error}");
}

//! A recipe has many spellings and one folder of checkpoints.

use super::{path, train_json};
use std::fs;

/// A run goes on however its recipe is spelled.
#[test]
fn spellings_of_one_recipe_have_one_folder() {
    let dir = tempfile::tempdir().expect("a folder");
    let saved = path(dir.path());
    let save = ["--steps", "3", "--no-baseline", "--save", &saved];
    let first = [
        &save[..],
        &["--recipe", "mxfp8+format=hybrid", "--stop-after", "1"],
    ]
    .concat();
    train_json(&first);
    let then = ["--recipe", "mxfp8+ hybrid", "--resume", &saved];
    let document = train_json(&[&save[..], &then].concat());
    assert_eq!(document["runs"][0]["resumed_at"], 1);
    let mut names = fs::read_dir(dir.path()).expect("a folder");
    let name = names.next().and_then(|entry| Some(entry.ok()?.file_name()));
    assert_eq!(name.as_deref(), Some("mxfp8+hybrid-seed0".as_ref()));
    assert!(names.next().is_none());
}

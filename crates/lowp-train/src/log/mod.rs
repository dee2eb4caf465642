//! [`RunLog`]: what happens in a run as files that other programs draw: JSON lines, and the event files of TensorBoard.

mod events;

use std::fmt::Display;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};

use crate::codes::LayerCodes;
use crate::error::TrainError;
use crate::metrics::Metrics;
use crate::result::Evaluation;
use events::Events;
use lowp_file::files::with_remedy;

/// A JSON object for each event.
const LINES: &str = "metrics.jsonl";
/// Of the line of a checkpoint.
const SAVED: &str = "saved";
/// What a run is.
const RECORD: &str = "run.json";

/// The files of one run, which has a folder of its own. Nothing in it changes before the first event.
#[derive(Debug)]
pub struct RunLog {
    folder: PathBuf,
    record: Value,
    kept: Kept,
    files: Option<Files>,
}

/// Open files.
#[derive(Debug)]
struct Files {
    lines: File,
    events: Events,
}

/// What a folder has of a run that was stopped.
#[derive(Debug)]
pub(crate) struct Earlier {
    /// What the run is.
    pub(crate) record: Value,
    lines: String,
}

impl Earlier {
    /// The files in `folder`, if there are any. What is damaged in them is left out.
    pub(crate) fn read(folder: &Path) -> Result<Self, TrainError> {
        let read = |name: &str| match fs::read(folder.join(name)) {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(String::new()),
            Err(e) => {
                let path = folder.join(name);
                let why = format!("{}: cannot read it: {e}", path.display());
                Err(unusable(folder, why))
            }
        };
        Ok(Self {
            record: serde_json::from_str(&read(RECORD)?).unwrap_or_default(),
            lines: read(LINES)?,
        })
    }

    /// Whether nothing was logged.
    pub(crate) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Whether there is a line of a step up to `last`.
    pub(crate) fn has_steps_to(&self, last: usize) -> bool {
        self.steps().any(|step| step <= last as u64)
    }

    /// The step of the last checkpoint that was saved.
    pub(crate) fn saved(&self) -> Option<u64> {
        let saved = self.events().filter(|(_, event)| event[SAVED] == true);
        saved.filter_map(|(_, event)| event["step"].as_u64()).max()
    }

    /// The lines of steps up to `last`, which are not written again; the evaluation after it is not either where the run `ends` there.
    pub(crate) fn up_to(self, last: usize, ends: bool) -> Kept {
        let of_last = |event: &Value| event["step"].as_u64() == Some(last as u64);
        let evaluated = |event: &Value| of_last(event) && event.get("val_loss").is_some();
        let kept = self
            .events()
            .filter(|(_, event)| event["step"].as_u64() <= Some(last as u64));
        Kept {
            lines: kept.map(|(line, _)| format!("{line}\n")).collect(),
            last: (last > 0 || !self.is_empty()).then_some(last),
            evaluated: ends && self.events().any(|(_, event)| evaluated(&event)),
        }
    }

    fn steps(&self) -> impl Iterator<Item = u64> {
        self.events()
            .filter_map(|(_, event)| event["step"].as_u64())
    }

    /// Lines, and what they say of a step.
    fn events(&self) -> impl Iterator<Item = (&str, Value)> {
        let lines = self.lines.lines();
        let events = lines.filter_map(|line| Some((line, serde_json::from_str(line).ok()?)));
        events.filter(|(_, event): &(_, Value)| event["step"].is_u64())
    }
}

/// What stays of the files of a run.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    lines: String,
    /// The last step of them, where steps may have been logged before.
    last: Option<usize>,
    /// Whether the evaluation after the last step of the run is among them.
    evaluated: bool,
}

impl RunLog {
    /// Files in `folder` of a run that `record` describes: its lines are appended to those that are `kept`.
    pub(crate) fn new(folder: &Path, record: Value, kept: Kept) -> Self {
        Self {
            folder: folder.to_owned(),
            record,
            kept,
            files: None,
        }
    }

    /// The open files, which replace those of an earlier start.
    fn files(&mut self) -> Result<&mut Files, TrainError> {
        let files = match self.files.take() {
            Some(files) => files,
            None => self.open()?,
        };
        Ok(self.files.insert(files))
    }

    fn open(&self) -> Result<Files, TrainError> {
        let Self { folder, kept, .. } = self;
        let failed = |why: &dyn Display| unwritable(folder, why);
        fs::create_dir_all(folder).map_err(|e| failed(&e))?;
        let path = folder.join(LINES);
        let write = |path: &Path, text: &str| {
            lowp_file::files::write_atomically(path, text).map_err(|e| failed(&e))
        };
        write(&path, &kept.lines)?;
        write(
            &folder.join(RECORD),
            &(serde_json::to_string_pretty(&self.record)? + "\n"),
        )?;
        let lines = OpenOptions::new().append(true).open(&path);
        Ok(Files {
            lines: lines.map_err(|e| failed(&e))?,
            events: Events::create(folder, kept.last).map_err(|e| failed(&e))?,
        })
    }

    /// Checks that files could be written in `folder`. Nothing is left.
    pub(crate) fn check_writable(folder: &Path) -> Result<(), TrainError> {
        lowp_checkpoint::check_writable(folder).map_err(|why| unusable(folder, why))
    }

    /// Creates `folder`, and locks it for the run that holds the file.
    pub(crate) fn lock(folder: &Path) -> Result<Option<File>, TrainError> {
        lowp_checkpoint::lock(folder).map_err(|why| unusable(folder, why))
    }

    /// Adds a step.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn step(&mut self, metrics: &Metrics) -> Result<(), TrainError> {
        self.line(metrics)?;
        let values = serde_json::to_value(metrics)?;
        let numbers = values
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(key, _)| *key != "step");
        // A loss that is not finite is null in JSON.
        let number = |key: &str, value: &Value| match (key, value) {
            ("loss", _) => Some(metrics.loss),
            ("grad_norm", _) => Some(metrics.grad_norm),
            (_, Value::Bool(flag)) => Some(f64::from(u8::from(*flag))),
            (_, value) => value.as_f64(),
        };
        let numbers = numbers.filter_map(|(key, value)| Some((key.clone(), number(key, value)?)));
        self.scalars(metrics.step, numbers.collect())
    }

    /// Adds a loss on the validation split, but not again that after the last step of a run.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn evaluation(&mut self, Evaluation { step, loss }: Evaluation) -> Result<(), TrainError> {
        if self.kept.evaluated && self.kept.last == Some(step) {
            return Ok(());
        }
        self.line(&json!({"step": step, "val_loss": loss}))?;
        self.scalars(step, vec![("val_loss".to_owned(), loss)])
    }

    /// Adds that the checkpoint after `step` steps is there.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn saved(&mut self, step: usize) -> Result<(), TrainError> {
        self.line(&json!({"step": step, SAVED: true}))
    }

    /// Adds the shares of codes of each layer after `step` steps.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn codes(&mut self, step: usize, layers: &[LayerCodes<'_>]) -> Result<(), TrainError> {
        self.line(&json!({"step": step, "codes": layers}))?;
        let shares = layers.iter().flat_map(|codes| {
            let tag = |what: &str| format!("codes/{}/{what}", codes.layer);
            [
                (tag("saturated"), codes.saturated),
                (tag("zero"), codes.zero),
            ]
        });
        self.scalars(step, shares.collect())
    }

    fn line(&mut self, value: &impl Serialize) -> Result<(), TrainError> {
        let line = serde_json::to_string(value)? + "\n";
        let written = self.files()?.lines.write_all(line.as_bytes());
        written.map_err(|e| unwritable(&self.folder, with_remedy(e)))
    }

    fn scalars(&mut self, step: usize, scalars: Vec<(String, f64)>) -> Result<(), TrainError> {
        let written = self.files()?.events.scalars(step as u64, &scalars);
        written.map_err(|e| unwritable(&self.folder, with_remedy(e)))
    }
}

/// Found before the run.
fn unusable(folder: &Path, why: impl Display) -> TrainError {
    TrainError::LogFolder {
        folder: folder.to_owned(),
        why: why.to_string(),
    }
}

fn unwritable(folder: &Path, why: impl Display) -> TrainError {
    TrainError::Log {
        folder: folder.to_owned(),
        why: why.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::made_up;

    fn lines(folder: &Path) -> Vec<Value> {
        let text = fs::read_to_string(folder.join(LINES)).expect("a file");
        let lines = text
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"));
        lines.collect()
    }

    #[test]
    fn a_resumed_log_has_each_step_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("run");
        let open = |step, ends| {
            let earlier = Earlier::read(&path).expect("files");
            RunLog::new(&path, json!({"recipe": "x"}), earlier.up_to(step, ends))
        };
        let mut log = open(0, false);
        for step in 1..=4 {
            log.step(&made_up(step)).expect("written");
        }
        let evaluation = Evaluation {
            step: 3,
            loss: f64::NAN,
        };
        log.evaluation(evaluation).expect("written");
        drop(log);

        let mut log = open(2, false);
        let codes = LayerCodes {
            layer: "up",
            saturated: 0.25,
            zero: 0.5,
        };
        log.codes(2, &[codes]).expect("written");
        log.step(&made_up(3)).expect("written");
        let steps = || {
            let found = lines(&path);
            let steps = found.iter().map(|line| line["step"].as_u64());
            steps.collect::<Option<Vec<_>>>().expect("steps")
        };
        assert_eq!(steps(), [1, 2, 2, 3]);
        let found = lines(&path);
        assert_eq!(found[1]["grad_norm"], 1.5);
        assert_eq!(found[2]["codes"][0]["saturated"], 0.25);

        // Of a run that ends at step 3, the evaluation there is logged once.
        log.evaluation(evaluation).expect("written");
        assert_eq!(steps(), [1, 2, 2, 3, 3]);
        let before = fs::read_dir(&path).expect("a folder").count();
        open(3, true).evaluation(evaluation).expect("nothing");
        // A start without a step changes nothing.
        drop(open(0, false));
        assert_eq!(steps(), [1, 2, 2, 3, 3]);
        assert_eq!(fs::read_dir(&path).expect("a folder").count(), before);
        open(0, false).step(&made_up(1)).expect("written");
        assert_eq!(steps(), [1]);
    }

    /// A page that was torn when the machine went down.
    #[test]
    fn bytes_that_are_no_text_are_left_out() {
        let folder = tempfile::tempdir().expect("a folder");
        let text = [b"{\"step\":1}\n".as_slice(), b"\xff\x80{\n{\"step\":2}\n"].concat();
        fs::write(folder.path().join(LINES), text).expect("a file");
        let earlier = Earlier::read(folder.path()).expect("files");
        assert!(earlier.has_steps_to(1) && !earlier.has_steps_to(0));
        assert_eq!(
            earlier.up_to(2, false).lines,
            "{\"step\":1}\n{\"step\":2}\n"
        );
    }
}

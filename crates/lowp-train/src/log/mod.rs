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

/// A JSON object for each event.
const LINES: &str = "metrics.jsonl";
/// What a run is.
const RECORD: &str = "run.json";

/// The files of one run, which has a folder of its own.
#[derive(Debug)]
pub struct RunLog {
    folder: PathBuf,
    lines: File,
    events: Events,
}

impl RunLog {
    /// Files in `folder`, which is made, of a run that `record` describes. A run that resumes after step `resumed` goes on behind what the
    /// files have up to it.
    ///
    /// # Errors
    /// The files of another run, or ones that cannot be written.
    pub fn open(folder: &Path, record: &Value, resumed: Option<usize>) -> Result<Self, TrainError> {
        let failed = |why: &dyn Display| unwritable(folder, why);
        let earlier = Self::earlier(folder, resumed)?;
        fs::create_dir_all(folder).map_err(|e| failed(&e))?;
        let path = folder.join(LINES);
        // Of steps that are done again, the lines that were written before are left out.
        let last = resumed.unwrap_or(0) as u64;
        let done = |line: &&str| {
            let line: Option<Value> = serde_json::from_str(line).ok();
            line.and_then(|line| line["step"].as_u64())
                .is_some_and(|step| step <= last)
        };
        let kept: String = earlier
            .lines()
            .filter(done)
            .map(|line| format!("{line}\n"))
            .collect();
        let write = |path: &Path, text: &str| {
            lowp_file::files::write_atomically(path, text).map_err(|e| failed(&e))
        };
        write(&path, &kept)?;
        write(
            &folder.join(RECORD),
            &(serde_json::to_string_pretty(record)? + "\n"),
        )?;
        let lines = OpenOptions::new().append(true).open(&path);
        Ok(Self {
            lines: lines.map_err(|e| failed(&e))?,
            events: Events::create(folder, resumed).map_err(|e| failed(&e))?,
            folder: folder.to_owned(),
        })
    }

    /// The lines that are there, which must be those of the run.
    pub(crate) fn earlier(folder: &Path, resumed: Option<usize>) -> Result<String, TrainError> {
        match fs::read_to_string(folder.join(LINES)) {
            Ok(text) if resumed.is_none() && !text.is_empty() => {
                let folder = folder.to_owned();
                Err(TrainError::EarlierLog { folder })
            }
            Ok(text) => Ok(text),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(String::new()),
            Err(e) => Err(unwritable(folder, e)),
        }
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

    /// Adds a loss on the validation split.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn evaluation(&mut self, Evaluation { step, loss }: Evaluation) -> Result<(), TrainError> {
        self.line(&json!({"step": step, "val_loss": loss}))?;
        self.scalars(step, vec![("val_loss".to_owned(), loss)])
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
        let written = self.lines.write_all(line.as_bytes());
        written.map_err(|e| unwritable(&self.folder, e))
    }

    fn scalars(&mut self, step: usize, scalars: Vec<(String, f64)>) -> Result<(), TrainError> {
        let written = self.events.scalars(step as u64, &scalars);
        written.map_err(|e| unwritable(&self.folder, e))
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
        let open = |resumed| RunLog::open(&path, &json!({"recipe": "x"}), resumed);
        let mut log = open(None).expect("a log");
        for step in 1..=4 {
            log.step(&made_up(step)).expect("written");
        }
        let evaluation = Evaluation {
            step: 3,
            loss: f64::NAN,
        };
        log.evaluation(evaluation).expect("written");
        drop(log);
        let error = open(None).expect_err("the log of a run");
        assert!(error.to_string().contains("of an earlier run"), "{error}");

        let mut log = open(Some(2)).expect("a log");
        let codes = LayerCodes {
            layer: "up",
            saturated: 0.25,
            zero: 0.5,
        };
        log.codes(2, &[codes]).expect("written");
        log.step(&made_up(3)).expect("written");
        let found = lines(&path);
        let steps: Vec<_> = found.iter().map(|line| line["step"].as_u64()).collect();
        assert_eq!(steps, [1, 2, 2, 3].map(Some));
        assert_eq!(found[1]["grad_norm"], 1.5);
        assert_eq!(found[2]["codes"][0]["saturated"], 0.25);
    }
}

//! [`Saver`]: checkpoints are written while training goes on.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{SystemTime, UNIX_EPOCH};

use lowp_shard::{Control, ShardError};
use serde_json::Value;

use crate::folder::{publish, remove, sync, unfinished};
use crate::index::{INDEX, Index, Written, checksum};
use crate::writer;
use crate::{CheckpointError, Piece};

/// Saves the checkpoints of one run. Every rank has one; each call is collective.
///
/// # Failure
/// A rank that cannot write is an error on every rank, of the call that finds it: [`Saver::poll`] after the next step. What
/// was saved before stays.
#[derive(Debug)]
pub struct Saver {
    control: Arc<dyn Control>,
    folder: PathBuf,
    keep: Option<usize>,
    writing: Option<Writing>,
}

/// A checkpoint on its way to the disk.
#[derive(Debug)]
struct Writing {
    step: u64,
    id: String,
    about: Value,
    file: JoinHandle<Result<Written, CheckpointError>>,
}

impl Saver {
    /// Saves to `folder`, which is created, and keeps the `keep` latest checkpoints, or all. Collective.
    ///
    /// # Errors
    /// The folder cannot be created, on every rank.
    pub fn new(
        control: Arc<dyn Control>,
        folder: &Path,
        keep: Option<usize>,
    ) -> Result<Self, CheckpointError> {
        let made = match control.rank() {
            0 => fs::create_dir_all(folder).map_err(CheckpointError::io(folder, "create")),
            _ => Ok(()),
        };
        let saver = Self {
            control,
            folder: folder.to_owned(),
            keep: keep.map(|keep| keep.max(1)),
            writing: None,
        };
        saver.agree_on("creating the folder of checkpoints", 0, made)?;
        Ok(saver)
    }

    /// The step that is being written.
    pub fn in_flight(&self) -> Option<u64> {
        self.writing.as_ref().map(|writing| writing.step)
    }

    /// Begins to write this rank's `pieces` as a part of the checkpoint of `step`. `about` is what the trainer wants to know
    /// again, of rank 0. Pieces that several ranks have are given by one of them. Collective.
    ///
    /// # Errors
    /// Pieces that do not fit their blocks, an earlier checkpoint that is still being written, or no folder to write to, on every
    /// rank.
    pub fn start(
        &mut self,
        step: u64,
        pieces: Vec<Piece>,
        about: Value,
    ) -> Result<(), CheckpointError> {
        let ready = match self.in_flight() {
            Some(step) => Err(CheckpointError::InFlight { step }),
            None => writer::check(&pieces),
        };
        let folder = unfinished(&self.folder, step);
        let ready = ready.and_then(|()| match self.control.rank() {
            // What a run that was stopped left.
            0 => remove(&folder).and_then(|()| {
                fs::create_dir(&folder).map_err(CheckpointError::io(&folder, "create"))
            }),
            _ => Ok(()),
        });
        self.agree_on("beginning a checkpoint", step, ready)?;
        let id = self
            .control
            .broadcast("the checkpoint's id", new_id(step))?;
        let id = String::from_utf8_lossy(&id).into_owned();
        let (rank, own) = (self.control.rank(), id.clone());
        let file = thread::Builder::new()
            .name("lowp-checkpoint".to_owned())
            .spawn(move || writer::write(&folder, rank, &own, &pieces));
        let file = file.map_err(CheckpointError::io(&self.folder, "start a thread for"));
        let (spawned, file) = match file {
            Ok(file) => (Ok(()), Some(file)),
            Err(error) => (Err(error), None),
        };
        self.agree_on("beginning a checkpoint", step, spawned)?;
        self.writing = file.map(|file| Writing {
            step,
            id,
            about,
            file,
        });
        Ok(())
    }

    /// Finishes the checkpoint that is being written if all ranks have written theirs, and returns its step then. Call it after
    /// every step. Collective; nothing happens if nothing is being written.
    ///
    /// # Errors
    /// A rank could not write ([`CheckpointError::NotSaved`] on every rank).
    pub fn poll(&mut self) -> Result<Option<u64>, CheckpointError> {
        let Some(writing) = &self.writing else {
            return Ok(None);
        };
        let done = vec![u8::from(writing.file.is_finished())];
        let done = self.control.exchange("is the checkpoint written", done)?;
        match done.iter().all(|done| done == &[1]) {
            true => self.finish(),
            false => Ok(None),
        }
    }

    /// Waits for the checkpoint that is being written, and returns its step. Collective.
    ///
    /// # Errors
    /// As [`Saver::poll`].
    pub fn finish(&mut self) -> Result<Option<u64>, CheckpointError> {
        let Some(writing) = self.writing.take() else {
            return Ok(None);
        };
        let Writing {
            step,
            id,
            about,
            file,
        } = writing;
        let written = file.join().unwrap_or_else(|_| {
            let path = unfinished(&self.folder, step);
            Err(CheckpointError::damaged(&path, "its writer panicked"))
        });
        let own = match &written {
            Ok(written) => serde_json::to_vec(&Ok::<_, String>(written)),
            Err(error) => serde_json::to_vec(&Err::<Written, _>(error.to_string())),
        };
        let own = own.unwrap_or_default();
        let all = self.control.exchange("what was written", own)?;
        let mut ranks = Vec::new();
        for (rank, bytes) in all.iter().enumerate() {
            let told = serde_json::from_slice::<Result<Written, String>>(bytes);
            let told = told.unwrap_or_else(|error| Err(error.to_string()));
            match told {
                Ok(written) => ranks.push(written),
                Err(why) => {
                    let rank = self.control.members()[rank];
                    return Err(CheckpointError::NotSaved { step, rank, why });
                }
            }
        }
        let published = match self.control.rank() {
            0 => self.publish((id, step), ranks, about),
            _ => Ok(()),
        };
        self.agree_on("the index of the checkpoint", step, published)?;
        Ok(Some(step))
    }

    fn publish(
        &self,
        (id, step): (String, u64),
        ranks: Vec<Written>,
        about: Value,
    ) -> Result<(), CheckpointError> {
        let path = unfinished(&self.folder, step).join(INDEX);
        let index = Index::new((id, step), ranks, about);
        let index = index.map_err(|why| CheckpointError::damaged(&path, why))?;
        let text = index.render().map_err(std::io::Error::other);
        let text = text.map_err(CheckpointError::io(&path, "write"))?;
        fs::write(&path, text).map_err(CheckpointError::io(&path, "write"))?;
        sync(&path)?;
        publish(&self.folder, step, self.keep)
    }

    /// Gives all ranks the error of one.
    fn agree_on(
        &self,
        what: &str,
        step: u64,
        own: Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let told = own.as_ref().err().map(ToString::to_string);
        let told = told.unwrap_or_default().into_bytes();
        let all = self.control.exchange(what, told)?;
        own?;
        let failed = all.iter().position(|text| !text.is_empty());
        failed.map_or(Ok(()), |rank| {
            Err(CheckpointError::NotSaved {
                step,
                rank: self.control.members()[rank],
                why: String::from_utf8_lossy(&all[rank]).into_owned(),
            })
        })
    }
}

impl Drop for Saver {
    /// A file that is being written is not left to a thread that the process may outlive or not.
    fn drop(&mut self) {
        if let Some(writing) = self.writing.take() {
            // The checkpoint stays unfinished, whatever came of the file.
            drop(writing.file.join());
        }
    }
}

/// A name that no other checkpoint has.
fn new_id(step: u64) -> Vec<u8> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |since| since.as_nanos());
    let text = format!("{now} {} {step}", std::process::id());
    checksum(text.as_bytes()).into_bytes()
}

impl From<CheckpointError> for ShardError {
    /// As the failure of this rank, which ends the others.
    fn from(error: CheckpointError) -> Self {
        match error {
            CheckpointError::Shard(error) => error,
            error => ShardError::Failed {
                rank: 0,
                message: error.to_string(),
            },
        }
    }
}

//! [`Saver`]: checkpoints are written while training goes on.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lowp_comm::Control;
use serde_json::Value;

use crate::folder::{
    folder_of, lock, mend_latest, publish, put, remove_replaced, shared_probe, steps, sync,
    thin_out, tidy, unfinished,
};
use crate::index::{INDEX, MAX_INDEX, check_about, checksum, file_name};
use crate::list::RankReport;
use crate::reader::lacks_files;
use crate::unfinished::UNFINISHED;
use crate::writer::{self, Disk, Progress};
use crate::writing::{FIRST_PAUSE, LONGEST_PAUSE, STALLED, Watch, Writing, wait};
use crate::{CheckpointError, Late, Piece};

mod written;

use written::{Written, read_reports};

/// Saves the checkpoints of one run. Every rank has one; each call is collective.
///
/// # Failure
/// A rank that cannot write is an error on every rank, of the call that finds it: [`Saver::poll`] after the next step. What
/// was saved before stays. A disk without room is such an error; a file larger than the process may write (`ulimit -f`) is one where the
/// process ignores SIGXFSZ or handles it, as programs in Python do: the signal ends it otherwise. [`Saver::finish`] gives a checkpoint up of
/// which no rank brings more to the disk for half an hour, as on a network file system that does not answer.
#[derive(Debug)]
pub struct Saver {
    control: Arc<dyn Control>,
    folder: PathBuf,
    keep: Option<usize>,
    writing: Option<Writing>,
    disk: Disk,
    /// How long no file may grow on the disk before a checkpoint is given up.
    stalled: Duration,
    /// Removes old checkpoints, which takes as long as writing; the errors of those that stay.
    removing: Option<JoinHandle<Vec<CheckpointError>>>,
    /// The step after which removals were due and none has begun since.
    due: Option<u64>,
    /// Held by the first rank: one run at a time saves to a folder. On a file system without locks runs do not disturb each other.
    lock: Option<File>,
    /// Steps whose checkpoints are this run's, and those that it found where it is alone. Of the first rank.
    own: BTreeSet<u64>,
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
        Self::with_lock(control, folder, keep, lock)
    }

    /// [`Saver::new`], where `lock` creates the folder and locks it, if it can be locked.
    fn with_lock(
        control: Arc<dyn Control>,
        folder: &Path,
        keep: Option<usize>,
        lock: impl FnOnce(&Path) -> Result<Option<File>, CheckpointError>,
    ) -> Result<Self, CheckpointError> {
        let mut saver = Self {
            control,
            folder: folder.to_owned(),
            keep: keep.map(|keep| keep.max(1)),
            writing: None,
            disk: Disk::default(),
            stalled: STALLED,
            removing: None,
            due: None,
            lock: None,
            own: BTreeSet::new(),
        };
        let first = saver.control.rank() == 0;
        let begun = match first {
            true => saver.take_folder(lock),
            false => Ok(()),
        };
        saver.agree_on("taking the folder of checkpoints", None, begun)?;
        let probe = saver.control.broadcast("a file to find", new_id(0))?;
        let probe = shared_probe(folder, &String::from_utf8_lossy(&probe));
        let put = |path: &Path| fs::write(path, "").map_err(CheckpointError::io(path, "create"));
        let put_first = if first { put(&probe) } else { Ok(()) };
        saver.agree_on("writing to the folder of checkpoints", None, put_first)?;
        // Every rank sees the folder of the first, and can write there.
        let own = probe.with_extension(saver.control.rank().to_string());
        let seen = fs::metadata(&probe).map_err(CheckpointError::io(&probe, "find"));
        let seen = seen.and_then(|_| put(&own));
        drop(fs::remove_file(&own));
        let seen = saver.agree_on("finding the folder of checkpoints", None, seen);
        if first {
            drop(fs::remove_file(&probe));
        }
        seen?;
        Ok(saver)
    }

    /// Creates the folder, locks it, and puts away what a run that was stopped left.
    fn take_folder(
        &mut self,
        lock: impl FnOnce(&Path) -> Result<Option<File>, CheckpointError>,
    ) -> Result<(), CheckpointError> {
        self.lock = lock(&self.folder)?;
        let alone = self.lock.is_some();
        tidy(&self.folder, alone)?;
        if alone {
            self.own.extend(steps(&self.folder)?);
        }
        Ok(())
    }

    /// The step that is being written.
    pub fn unfinished(&self) -> Option<u64> {
        self.writing.as_ref().map(|writing| writing.step)
    }

    /// Begins to write this rank's `pieces` as a part of the checkpoint of `step`. `about` is what the trainer wants to know
    /// again, of rank 0. Pieces that several ranks have are given by one of them; the thread that writes waits for bytes that are
    /// [`Late`]. Collective.
    ///
    /// # Errors
    /// Pieces that do not fit their blocks, an earlier checkpoint that is still being written, or no folder to write to, on every
    /// rank.
    pub fn start(
        &mut self,
        step: u64,
        pieces: Vec<impl Into<Piece<Late>>>,
        about: Value,
    ) -> Result<(), CheckpointError> {
        let pieces: Vec<Piece<Late>> = pieces.into_iter().map(Into::into).collect();
        let arranged = match self.unfinished() {
            Some(step) => Err(CheckpointError::Unfinished { step }),
            None => writer::arrange(pieces),
        };
        let (ready, pieces) = match arranged {
            Ok(pieces) => (Ok(()), pieces),
            Err(error) => (Err(error), Vec::new()),
        };
        let id = self
            .control
            .broadcast("the checkpoint's id", new_id(step))?;
        let id = String::from_utf8_lossy(&id).into_owned();
        let folder = unfinished(&self.folder, step, &id);
        let ready = ready.and_then(|()| match self.control.rank() {
            0 => {
                check_about(&about)?;
                UNFINISHED
                    .create(&folder)
                    .map_err(CheckpointError::io(&folder, "create"))
            }
            _ => Ok(()),
        });
        let began = self.agree_on("beginning a checkpoint", Some(step), ready);
        began.inspect_err(|_| self.give_up(&folder))?;
        let (rank, own) = (self.control.rank(), id.clone());
        let to = folder.clone();
        let progress = Arc::new(Progress::default());
        let (counted, disk) = (Arc::clone(&progress), self.disk);
        let file = thread::Builder::new()
            .name("lowp-checkpoint".to_owned())
            .spawn(move || writer::write(&to, rank, &own, pieces, counted, disk));
        let file = file.map_err(CheckpointError::io(&self.folder, "start a thread for"));
        let (spawned, file) = match file {
            Ok(file) => (Ok(()), Some(file)),
            Err(error) => (Err(error), None),
        };
        let writing = file.map(|file| Writing {
            step,
            id,
            folder: folder.clone(),
            about,
            progress,
            file,
        });
        if let Err(error) = self.agree_on("beginning a checkpoint", Some(step), spawned) {
            // A rank could start no thread. This one waits for its own, as in `drop`.
            match writing {
                Some(writing) => self.end(writing),
                None => self.give_up(&folder),
            }
            return Err(error);
        }
        self.writing = writing;
        Ok(())
    }

    /// Finishes the checkpoint that is being written if all ranks have written theirs, and returns its step then. Call it after
    /// every step. Collective; nothing happens if nothing is being written.
    ///
    /// # Errors
    /// A rank could not write ([`CheckpointError::NotSaved`] on every rank), or all is written and may not survive a power loss
    /// ([`CheckpointError::NotOnDisk`]).
    pub fn poll(&mut self) -> Result<Option<u64>, CheckpointError> {
        match self.progress(false)? {
            Some([0.0, ..]) => self.publish_written(),
            _ => Ok(None),
        }
    }

    /// Waits for the checkpoint that is being written, and returns its step. Collective.
    ///
    /// # Errors
    /// As [`Saver::poll`]; or no rank brings more of it to the disk.
    pub fn finish(&mut self) -> Result<Option<u64>, CheckpointError> {
        // Ranks meet while they wait, so that one whose file takes long is not taken for one that is gone.
        let (mut pause, mut watch, mut stalled) = (FIRST_PAUSE, Watch::new(), false);
        while let Some([open, bytes, given_up]) = self.progress(stalled)? {
            if open == 0.0 {
                break;
            }
            if given_up > 0.0 {
                return self.give_up_stalled();
            }
            stalled = watch.is_stalled([open, bytes], self.stalled);
            thread::sleep(pause);
            pause = (pause + pause / 4).min(LONGEST_PAUSE);
        }
        self.publish_written()
    }

    /// How many ranks have not written their files, the bytes of all that are on the disk so far, and how many ranks would wait no longer, as this
    /// one if it is `stalled`; `None` if nothing is being written.
    fn progress(&self, stalled: bool) -> Result<Option<[f64; 3]>, CheckpointError> {
        let Some(writing) = &self.writing else {
            return Ok(None);
        };
        let [open, bytes] = writing.state();
        let mut all = [open, bytes, f64::from(stalled)];
        self.control.sum(&mut all)?;
        Ok(Some(all))
    }

    /// Leaves a checkpoint to threads that may never end; the next run puts away what they leave.
    fn give_up_stalled(&mut self) -> Result<Option<u64>, CheckpointError> {
        let Some(writing) = self.writing.take() else {
            return Ok(None);
        };
        writing.progress.given_up.store(true, Ordering::Relaxed);
        let [open, bytes] = writing.state();
        let why = match open {
            0.0 => String::new(),
            _ => format!(
                "{} is not on the disk but for {bytes} bytes, and no file of any rank grew for {:?}; see whether its file system and its device answer, or save to another file system",
                writing
                    .folder
                    .join(file_name(self.control.rank()))
                    .display(),
                self.stalled,
            ),
        };
        let all = self
            .control
            .all_gather("files that are not written", why.into_bytes())?;
        let step = writing.step;
        match all.iter().position(|why| !why.is_empty()) {
            Some(rank) => {
                UNFINISHED.leave(&writing.folder);
                let (why, rank) = (text(&all[rank]), self.control.members()[rank]);
                Err(CheckpointError::NotSaved { step, rank, why })
            }
            // The last one ended meanwhile.
            None => {
                self.writing = Some(writing);
                self.publish_written()
            }
        }
    }

    fn publish_written(&mut self) -> Result<Option<u64>, CheckpointError> {
        let Some(writing) = self.writing.take() else {
            return Ok(None);
        };
        let Writing {
            step,
            id,
            folder,
            about,
            file,
            ..
        } = writing;
        let written = file
            .join()
            .unwrap_or_else(|_| Err(CheckpointError::damaged(&folder, "its writer panicked")));
        let told = self.tell_written(written, &folder);
        let written = match told.inspect_err(|_| self.give_up(&folder))? {
            Ok(written) => written,
            Err((rank, why)) => {
                let rank = self.control.members()[rank];
                self.give_up(&folder);
                return Err(CheckpointError::NotSaved { step, rank, why });
            }
        };
        let published = match written {
            Some(written) => self.publish(&folder, id, step, written, about),
            None => Ok(()),
        };
        let is_published = published.is_ok();
        let failed = published.map_or_else(|error| error.to_string(), |()| String::new());
        let told = self
            .control
            .broadcast("the index of the checkpoint", failed.into_bytes());
        let failed = told.inspect_err(|_| {
            if !is_published {
                self.give_up(&folder);
            }
        })?;
        if !failed.is_empty() {
            // Once all have heard why: to remove much may take long.
            self.give_up(&folder);
            let (rank, why) = (self.control.members()[0], text(&failed));
            return Err(CheckpointError::NotSaved { step, rank, why });
        }
        self.own.insert(step);
        let on_disk = match self.control.rank() {
            0 => sync(&self.folder),
            _ => Ok(()),
        };
        let why = on_disk.map_or_else(|error| error.to_string(), |()| String::new());
        let why = self
            .control
            .broadcast("whether the checkpoint is on the disk", why.into_bytes())?;
        if !why.is_empty() {
            // Those before it may be all that a power loss leaves.
            let why = text(&why);
            return Err(CheckpointError::NotOnDisk { step, why });
        }
        self.remove_old(step);
        Ok(Some(step))
    }

    /// Gives the first rank what each has `written` into `folder`, and all ranks the first that could not write and why not.
    fn tell_written(
        &self,
        written: Result<(RankReport, Vec<u8>), CheckpointError>,
        folder: &Path,
    ) -> Result<Result<Option<Written>, (usize, String)>, CheckpointError> {
        let (own, table) = match written {
            Ok((report, table)) => (Ok(report), table),
            Err(error) => (Err(error.to_string()), Vec::new()),
        };
        let digest = own.as_ref().map_or(0, |report| report.table);
        let own = postcard::to_stdvec(&own).unwrap_or_default();
        let all = self.control.gather("what was written", own)?;
        let reports = all.map(|all| read_reports(&all, digest, folder));
        // The ranks that are asked for their tables, or why nothing is saved.
        let asked = reports.as_ref().map(|reports| match reports {
            Ok((_, asked)) => Ok(asked),
            Err(failed) => Err(failed),
        });
        let asked = asked.map_or_else(Vec::new, |asked| {
            postcard::to_stdvec(&asked).unwrap_or_default()
        });
        let asked = self
            .control
            .broadcast("whose tensors are asked for", asked)?;
        let asked = postcard::from_bytes::<Result<Vec<usize>, (usize, String)>>(&asked);
        let asked = match asked.unwrap_or_else(|error| Err((0, error.to_string()))) {
            Ok(asked) => asked,
            Err(failed) => return Ok(Err(failed)),
        };
        let mut tables = vec![(digest, table)];
        if !asked.is_empty() {
            let answer = match asked.binary_search(&self.control.rank()) {
                Ok(_) => tables[0].1.clone(),
                Err(_) => Vec::new(),
            };
            let answers = self.control.gather("the tensors of a rank", answer)?;
            if let (Some(mut answers), Some(Ok((reports, _)))) = (answers, &reports) {
                let given = asked
                    .iter()
                    .map(|&rank| (reports[rank].table, std::mem::take(&mut answers[rank])));
                tables.extend(given);
            }
        }
        let reports = reports.and_then(Result::ok);
        Ok(Ok(reports.map(|(reports, _)| Written { reports, tables })))
    }

    fn publish(
        &self,
        unfinished: &Path,
        id: String,
        step: u64,
        written: Written,
        about: Value,
    ) -> Result<(), CheckpointError> {
        let path = unfinished.join(INDEX);
        let index = written.index(id, step, about).map_err(|why| {
            CheckpointError::Invalid(format!(
                "the pieces of the ranks do not form a checkpoint: {why}"
            ))
        })?;
        let text = index.render().map_err(std::io::Error::other);
        let text = text.map_err(CheckpointError::io(&path, "write"))?;
        if text.len() as u64 > MAX_INDEX {
            return Err(CheckpointError::TooLong {
                path,
                what: "the index",
                pieces: index.pieces(),
                bytes: text.len() as u64,
                most: MAX_INDEX,
            });
        }
        put(&path, text.as_bytes())?;
        UNFINISHED.publish(unfinished, || {
            publish(&self.folder, unfinished, &index.id, step)
        })
    }

    /// Begins to remove what the checkpoint of `step` replaced, and those that are not kept, as each save does. Where earlier removals are
    /// under way, or no thread can be started, it is done after the next checkpoint or at the end.
    pub fn remove_old(&mut self, step: u64) {
        if self.control.rank() != 0 {
            return;
        }
        self.due = Some(step);
        if self.is_removing() {
            return;
        }
        let (folder, keep) = (self.folder.clone(), self.keep);
        self.own.retain(|&own| folder_of(&folder, own).exists());
        let steps = self.own.range(..=step).copied().collect();
        let remove = move || {
            let mut left = remove_replaced(&folder);
            if let Some(keep) = keep {
                left.extend(thin_out(&folder, steps, keep, |place| !lacks_files(place)));
            }
            left
        };
        self.removing = thread::Builder::new().spawn(remove).ok();
        if self.removing.is_some() {
            self.due = None;
        }
    }

    /// Waits for the file of a checkpoint that comes to nothing, and removes the checkpoint; one whose file system does not answer is left to
    /// the next run.
    fn end(&self, writing: Writing) {
        let folder = writing.folder.clone();
        match writing.give_up(self.stalled) {
            true => self.give_up(&folder),
            false => UNFINISHED.leave(&folder),
        }
    }

    /// Removes what was written into `unfinished`: a disk that is full has its room again. What stays is removed by the next run.
    fn give_up(&self, unfinished: &Path) {
        if self.control.rank() == 0 {
            drop(UNFINISHED.remove(unfinished));
        }
    }

    fn is_removing(&self) -> bool {
        self.removing.as_ref().is_some_and(|it| !it.is_finished())
    }

    /// Waits for removals, also for those that are due, but for half an hour at most. Returns the errors of old checkpoints that stay, on the first rank: they
    /// end no run, and the next run that saves to the folder removes what is left. Collective.
    ///
    /// # Errors
    /// A rank failed meanwhile.
    pub fn finish_removals(&mut self) -> Result<Vec<CheckpointError>, CheckpointError> {
        let (mut left, mut pause, begun) = (Vec::new(), FIRST_PAUSE, Instant::now());
        loop {
            let goes_on = self.go_on_removing(&mut left);
            let gives_up = goes_on && begun.elapsed() > self.stalled;
            let mut all = [goes_on, gives_up].map(f64::from);
            self.control.sum(&mut all)?;
            if gives_up {
                let late = CheckpointError::io(&self.folder, "remove old checkpoints");
                left = vec![late(ErrorKind::TimedOut.into())];
                // The next run goes on.
                (self.removing, self.due) = (None, None);
            }
            if all[0] == 0.0 || all[1] > 0.0 {
                return Ok(left);
            }
            thread::sleep(pause);
            pause = (pause + pause / 4).min(LONGEST_PAUSE);
        }
    }

    /// Whether checkpoints are being removed. The errors of removals that have ended replace those `left` before, and those that are due begin.
    fn go_on_removing(&mut self, left: &mut Vec<CheckpointError>) -> bool {
        if self.is_removing() {
            return true;
        }
        if let Some(ended) = self.removing.take() {
            *left = ended.join().unwrap_or_default();
        }
        if let Some(step) = self.due {
            self.remove_old(step);
        }
        self.removing.is_some()
    }

    /// Makes the checkpoint of `step` the latest where the file that names the latest is damaged, or names none that is there, and none is later.
    ///
    /// # Errors
    /// The file cannot be written, on the first rank.
    pub fn mend_latest(&self, step: u64) -> Result<(), CheckpointError> {
        match self.control.rank() {
            0 => mend_latest(&self.folder, &text(&new_id(step)), step),
            _ => Ok(()),
        }
    }

    /// Gives all ranks the error of one.
    fn agree_on(
        &self,
        what: &str,
        step: Option<u64>,
        own: Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let error = own.as_ref().err();
        let first = self
            .control
            .first_error(what, error.map(|error| error as _))?;
        own?;
        first.map_or(Ok(()), |(rank, why)| {
            Err(match step {
                Some(step) => CheckpointError::NotSaved { step, rank, why },
                None => CheckpointError::OtherRank { rank, why },
            })
        })
    }
}

impl Drop for Saver {
    /// A file that is being written is not left to a thread that the process may outlive or not. Its checkpoint is given up.
    fn drop(&mut self) {
        if let Some(writing) = self.writing.take() {
            self.end(writing);
        }
        // What stays is removed by the next run.
        while self.go_on_removing(&mut Vec::new())
            && let Some(removing) = &self.removing
        {
            wait(removing, || [0.0; 2], self.stalled);
            if self.is_removing() {
                return;
            }
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A name that no other checkpoint has.
fn new_id(step: u64) -> Vec<u8> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |since| since.as_nanos());
    let text = format!("{now} {} {step}", std::process::id());
    checksum(text.as_bytes()).into_bytes()
}

#[cfg(test)]
mod tests;

//! Regular files that are read or written whole.

use crate::limits::no_room;
use crate::output::unpublished::Unpublished;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

pub use crate::output::resolve::resolve;

/// Writes `contents` to a temporary name next to `path`, syncs it and renames it into place. It has the permissions of a file that it replaces,
/// and belongs to who runs the program.
///
/// # Errors
/// If the file cannot be created, written or renamed; nothing is left then.
pub fn write_atomically(path: &Path, contents: &str) -> io::Result<()> {
    let new = Unpublished::file(path)?;
    let mut out = new.create()?;
    let written = out.write_all(contents.as_bytes());
    written.map_err(|error| no_room(error, &out))?;
    out.sync_all()?;
    new.publish()
}

/// Finds out whether [`write_atomically`] could write `path` now.
///
/// # Errors
/// `path` is no file name, or `-`; it exists as something else than a regular file, or lies in a folder that is
/// missing or cannot be written.
pub fn check_writable(path: &Path) -> io::Result<()> {
    Unpublished::file(path).map(drop)
}

/// Opens a regular file for reading and tells its length. A pipe, whose writer may never come, or a device, which may
/// never end, is an error and is not waited for.
pub(crate) fn open_regular(path: &Path) -> io::Result<(File, u64)> {
    let regular = |data: &fs::Metadata| match data.file_type() {
        kind if kind.is_file() => Ok(()),
        kind if kind.is_dir() => Err(io::Error::from(io::ErrorKind::IsADirectory)),
        _ => Err(io::Error::other(
            "a pipe or a device and no regular file; write what it gives to a file first",
        )),
    };
    // Opening alone does something to some devices, such as a tape.
    regular(&fs::metadata(path)?)?;
    let mut options = File::options();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags(libc::O_NONBLOCK);
    }
    let file = options.open(path)?;
    // It may be another one by now.
    let data = file.metadata()?;
    regular(&data)?;
    Ok((file, data.len()))
}

/// Reads a regular file of at most `limit` bytes.
///
/// # Errors
/// There is no such file, it cannot be read, or it is no regular file; it is longer, or there is no memory for it.
pub fn read_regular(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let (file, length) = open_regular(path)?;
    if length > limit {
        return Err(io::Error::other(format!(
            "{length} bytes, and at most {limit} are read into memory; give a shorter file"
        )));
    }
    let mut bytes = Vec::new();
    let room = usize::try_from(length).unwrap_or(usize::MAX);
    bytes
        .try_reserve_exact(room)
        .map_err(|_| io::Error::other(format!("there is no memory for its {length} bytes")))?;
    // One that grows meanwhile is read as far as it was.
    file.take(length).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_a_file_and_leaves_nothing_else() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("out.json");
        drop(Unpublished::file(&path)?);
        assert_eq!(fs::read_dir(dir.path())?.count(), 0);
        write_atomically(&path, "one")?;
        drop(Unpublished::file(&path)?);
        write_atomically(&path, "two")?;
        assert_eq!(fs::read_to_string(&path)?, "two");
        assert_eq!(fs::read_dir(dir.path())?.count(), 1);
        assert!(write_atomically(dir.path(), "").is_err());
        Ok(())
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_a_link() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "old")?;
        std::os::unix::fs::symlink(&file, &link)?;
        write_atomically(&link, "new")?;
        assert!(fs::symlink_metadata(&link)?.is_symlink());
        assert_eq!(fs::read_to_string(&file)?, "new");
        Ok(())
    }
}

//! [`resolve`]: where the path of an output leads.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The path after links are followed; its parent must exist.
///
/// # Errors
/// There is no such folder, or a link names nothing.
pub fn resolve(path: &Path) -> io::Result<PathBuf> {
    // Another process may make it or remove it in between.
    for _ in 0..100 {
        let found = fs::canonicalize(path);
        let gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
        if !found.as_ref().is_err_and(gone) {
            return resolved(path, found);
        }
        match fs::symlink_metadata(path) {
            // A rename would replace the link and not what it names.
            Ok(data) if data.is_symlink() && fs::metadata(path).as_ref().is_err_and(gone) => {
                return Err(io::Error::other(
                    "it is a link to something that is not there; make that, or give another name",
                ));
            }
            Ok(_) => {}
            Err(_) => return resolved(path, found),
        }
    }
    Err(io::Error::other(
        "other processes make it and remove it all the time; give another name",
    ))
}

/// The path of [`resolve`], where the system says `found` of it.
fn resolved(path: &Path, found: io::Result<PathBuf>) -> io::Result<PathBuf> {
    match found {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let name = path
                .file_name()
                .ok_or_else(|| io::Error::other("it is no file name"))?;
            let parent = path
                .parent()
                .filter(|parent| !parent.as_os_str().is_empty());
            let parent = parent.unwrap_or(Path::new("."));
            let folder = fs::canonicalize(parent).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => io::Error::other(format!(
                    "there is no folder {}; make it, or give a name in another one",
                    parent.display()
                )),
                _ => error,
            })?;
            Ok(folder.join(name))
        }
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Err(io::Error::other(
            "a part of it before its name is no folder; give a name in another one",
        )),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A link to nothing is an error, and whatever another process makes or removes at the moment is not taken for one.
    #[cfg(unix)]
    #[test]
    fn names_that_come_and_go() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path().join("nothing"), &link)?;
        let error = resolve(&link).unwrap_err();
        assert!(error.to_string().contains("a link to something"), "{error}");
        let path = dir.path().join("file");
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                for _ in 0..2000 {
                    fs::write(&path, "").and_then(|()| fs::remove_file(&path))?;
                }
                io::Result::Ok(())
            });
            while !other.is_finished() {
                assert_eq!(resolve(&path)?.file_name(), path.file_name());
            }
            other.join().expect("no panic")
        })?;
        Ok(())
    }
}

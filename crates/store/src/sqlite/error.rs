//! What SQLite's errors mean for a caller of the store.

use std::time::Duration;

use sqlite::Error as FileError;

use crate::Error;

impl From<FileError> for Error {
    fn from(error: FileError) -> Self {
        match error {
            FileError::Busy | FileError::Closed => {
                Self::Unavailable { reason: error.to_string(), retry_after: Duration::from_millis(50) }
            }
            FileError::Disk(_) => {
                Self::Unavailable { reason: error.to_string(), retry_after: Duration::from_secs(1) }
            }
            FileError::Folder { .. }
            | FileError::Open { .. }
            | FileError::Newer { .. }
            | FileError::Statement(_)
            | FileError::Panicked(_) => Self::Broken(error.to_string()),
        }
    }
}

impl From<rusqlite::Error> for Error {
    fn from(error: rusqlite::Error) -> Self {
        FileError::from(error).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_passes_by_itself_is_transient() {
        let cases = [
            (FileError::Busy, true),
            (FileError::Closed, true),
            (FileError::Disk("full".to_owned()), true),
            (FileError::Statement("no such table".to_owned()), false),
            (FileError::Newer { found: 9, known: 1 }, false),
            (FileError::Panicked("x".to_owned()), false),
        ];
        for (error, transient) in cases {
            assert_eq!(Error::from(error.clone()).is_transient(), transient, "{error}");
        }
    }
}

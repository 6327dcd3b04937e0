//! Paths of entries, and where links lead. Pure.

use crate::Refusal;
use crate::limit::{DEPTH_MAX, PATH_BYTES_MAX};

/// Directories of a machine that show that a snapshot has no directory around them.
pub(crate) const TOPS: [&str; 9] = [
    "sys", "proc", "dev", "etc", "usr", "opt", "run", "lib", "lib64",
];

/// Splits a recorded path into segments, without `.` and empty ones.
pub(crate) fn segments(path: &[u8]) -> Result<Vec<&str>, Refusal> {
    if path.len() > PATH_BYTES_MAX {
        return Err(Refusal::LongPath);
    }
    let path = str::from_utf8(path).map_err(|_| Refusal::BadPath)?;
    let segments: Vec<_> = path
        .split('/')
        .filter(|segment| !matches!(*segment, "" | "."))
        .collect();
    if path.starts_with('/') || path.contains('\0') || segments.contains(&"..") {
        return Err(Refusal::BadPath);
    }
    if segments.len() > DEPTH_MAX {
        Err(Refusal::Deep)
    } else {
        Ok(segments)
    }
}

/// Returns the segments of a link's target from the snapshot's root. Other links on the way are not resolved.
pub(crate) fn target(link: &str, target: &str) -> Result<Vec<String>, Refusal> {
    if target.len() > PATH_BYTES_MAX {
        return Err(Refusal::LongPath);
    }
    let mut segments: Vec<&str> = link
        .split('/')
        .filter(|segment| !segment.is_empty())
        .collect();
    segments.pop();
    if target.starts_with('/') {
        segments.clear();
    }
    for segment in target.split('/') {
        let leaves = match segment {
            "" | "." => false,
            ".." => segments.pop().is_none(),
            name => {
                segments.push(name);
                false
            }
        };
        if leaves {
            return Err(Refusal::LinkLeaves {
                target: target.to_owned(),
            });
        }
    }
    Ok(segments.into_iter().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots_and_trailing_slashes_are_dropped() {
        assert_eq!(segments(b"./sys/class/"), Ok(vec!["sys", "class"]));
        assert_eq!(segments(b"./"), Ok(vec![]));
    }

    #[test]
    fn absolute_and_climbing_paths_are_refused() {
        for path in [&b"/sys"[..], b"sys/../etc", b"..", b"sys/\xff", b"sys/a\0b"] {
            assert_eq!(segments(path), Err(Refusal::BadPath), "{path:?}");
        }
        assert_eq!(
            segments("a/".repeat(DEPTH_MAX + 1).as_bytes()),
            Err(Refusal::Deep)
        );
        assert_eq!(
            segments(&[b'a'; PATH_BYTES_MAX + 1]),
            Err(Refusal::LongPath)
        );
    }

    #[test]
    fn targets_stay_below_the_root() {
        assert_eq!(
            target("/sys/class/drm/card0", "../../devices/x").unwrap(),
            ["sys", "devices", "x"]
        );
        assert_eq!(target("/sys/a", "/sys/b/../c").unwrap(), ["sys", "c"]);
        assert_eq!(target("/sys/a", "..").unwrap(), Vec::<String>::new());
        for leaving in ["../../etc", "/..", "b/../../../c"] {
            let refusal = Refusal::LinkLeaves {
                target: leaving.into(),
            };
            assert_eq!(target("/sys/a", leaving), Err(refusal), "{leaving}");
        }
    }
}

//! Names of the node's users and groups.

use std::io;
use std::path::Path;

const PASSWD: &str = "/etc/passwd";

/// Returns the name of a user in the node's `passwd`. Users of a directory service have none here.
pub fn name(uid: u32) -> Option<String> {
    name_in(Path::new(PASSWD), uid)
}

fn name_in(passwd: &Path, uid: u32) -> Option<String> {
    // no error: the number is shown instead of the name
    let text = std::fs::read_to_string(passwd).ok()?;
    let name = text
        .lines()
        .find(|line| line.split(':').nth(2).and_then(|field| field.parse().ok()) == Some(uid))?
        .split(':')
        .next()?;
    Some(name.to_owned()).filter(|name| !name.is_empty())
}

/// Returns the number of a group in a file of the form of `/etc/group`. Groups of a directory service have none there.
pub fn group_in(groups: &Path, name: &str) -> io::Result<Option<u32>> {
    let text = std::fs::read_to_string(groups)?;
    Ok(text.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
    }))
}

const SUBUID: &str = "/etc/subuid";

/// Returns whether a user is one of those that another user may be in a user namespace (subuid(5)).
///
/// # Errors
///
/// The file of these ranges is there and cannot be read.
pub fn is_subordinate(uid: u32) -> io::Result<bool> {
    match std::fs::read_to_string(SUBUID) {
        Ok(ranges) => Ok(is_subordinate_in(&ranges, uid)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Looks a user up in lines of `NAME:START:COUNT`.
fn is_subordinate_in(ranges: &str, uid: u32) -> bool {
    ranges.lines().any(|line| {
        let mut numbers = line
            .split(':')
            .skip(1)
            .map(|number| number.trim().parse::<u32>());
        match (numbers.next(), numbers.next()) {
            (Some(Ok(start)), Some(Ok(count))) => {
                uid.checked_sub(start).is_some_and(|offset| offset < count)
            }
            _ => false,
        }
    })
}

/// Returns the user of this process outside its user namespace, in which it may be root.
///
/// # Errors
///
/// `/proc/self/uid_map` cannot be read or has no such user.
pub fn outer_uid() -> io::Result<u32> {
    let map = std::fs::read_to_string("/proc/self/uid_map")?;
    let inner = rustix::process::geteuid().as_raw();
    outer_uid_in(&map, inner)
        .ok_or_else(|| io::Error::other(format!("/proc/self/uid_map has no user {inner}")))
}

/// Looks a user up in lines of `INSIDE OUTSIDE COUNT` (user_namespaces(7)).
fn outer_uid_in(map: &str, inner: u32) -> Option<u32> {
    map.lines().find_map(|line| {
        let mut numbers = line
            .split_ascii_whitespace()
            .map(|number| number.parse::<u32>().ok());
        let (inside, outside, count) = (numbers.next()??, numbers.next()??, numbers.next()??);
        let offset = inner.checked_sub(inside).filter(|offset| *offset < count)?;
        outside.checked_add(offset)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_name_is_read_from_passwd() {
        let directory = tempfile::tempdir().unwrap();
        let passwd = directory.path().join("passwd");
        std::fs::write(
            &passwd,
            "# users\nroot:x:0:0::/root:/bin/sh\n:x:7:7\nop:x:1000:1000:An operator:/:/bin/sh\nop",
        )
        .unwrap();
        assert_eq!(name_in(&passwd, 0).as_deref(), Some("root"));
        assert_eq!(name_in(&passwd, 1000).as_deref(), Some("op"));
        assert_eq!((name_in(&passwd, 7), name_in(&passwd, 8)), (None, None));
        assert_eq!(name_in(&directory.path().join("none"), 0), None);
    }

    #[test]
    fn user_is_known_outside_its_namespace() {
        let map = "         0       1000          1\n         1     100000      65536\n";
        assert_eq!(outer_uid_in(map, 0), Some(1000));
        assert_eq!(outer_uid_in(map, 7), Some(100_006));
        assert_eq!(
            (outer_uid_in(map, 70_000), outer_uid_in("x", 0)),
            (None, None)
        );
        assert_eq!(outer_uid_in("0 0 4294967295\n", 5), Some(5));
        assert!(outer_uid().is_ok());
    }

    #[test]
    fn subordinate_users_are_known() {
        let ranges = "# users\nop:100000:65536\n1000:300000:1\nbad:x:1\n";
        let known = [99_999, 100_000, 165_535, 165_536, 300_000, 300_001];
        let expected = [false, true, true, false, true, false];
        assert_eq!(known.map(|uid| is_subordinate_in(ranges, uid)), expected);
    }

    #[test]
    fn group_number_is_read_from_group() {
        let directory = tempfile::tempdir().unwrap();
        let groups = directory.path().join("group");
        std::fs::write(&groups, "root:x:0:\nbad:x:\npodman:x:991:op,podman\nlast").unwrap();
        let number = |name| group_in(&groups, name).unwrap();
        assert_eq!(
            (number("root"), number("podman"), number("bad")),
            (Some(0), Some(991), None)
        );
        assert_eq!(
            (number("op"), number("last"), number("")),
            (None, None, None)
        );
        assert!(group_in(&directory.path().join("none"), "root").is_err());
    }
}

//! Files, directories and links as in sysfs: links are relative and leave their directory.

use std::collections::BTreeMap;
use std::ops::Bound;

use nodedock_model::grant::pattern::{GlobMatcher, compile};

use crate::Problem;

const LINKS_MAX: usize = 40;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Entry {
    File(Vec<u8>),
    Dir,
    Link(String),
}

/// Entries by path relative to the root; the root itself is the empty path.
#[derive(Debug)]
pub(crate) struct Tree {
    /// Mount point, with a slash at the end: absolute links lead below it.
    mount: &'static str,
    entries: BTreeMap<String, Entry>,
}

impl Tree {
    pub(crate) fn new(mount: &'static str) -> Self {
        Tree {
            mount,
            entries: BTreeMap::new(),
        }
    }

    pub(crate) fn insert(&mut self, path: &str, entry: Entry) {
        let path = path.trim_matches('/');
        let mut end = 0;
        while let Some(slash) = path[end..].find('/') {
            self.entries
                .entry(path[..end + slash].to_owned())
                .or_insert(Entry::Dir);
            end += slash + 1;
        }
        self.entries.insert(path.to_owned(), entry);
    }

    /// Removes an entry with its content.
    pub(crate) fn remove(&mut self, path: &str) {
        let path = path.trim_matches('/');
        let inside: Vec<_> = self.inside(path).map(|(path, _)| path.clone()).collect();
        for path in inside.iter().map(String::as_str).chain([path]) {
            self.entries.remove(path);
        }
    }

    /// Returns every entry below a directory, which is not empty.
    fn inside(&self, directory: &str) -> impl Iterator<Item = (&String, &Entry)> {
        self.entries
            .range(format!("{directory}/")..after_content(directory))
    }

    /// Returns the paths of all entries of this name.
    pub(crate) fn paths_of(&self, name: &str) -> Vec<String> {
        let is_named = |path: &&String| path.rsplit('/').next() == Some(name);
        self.entries.keys().filter(is_named).cloned().collect()
    }

    pub(crate) fn get(&self, path: &str) -> Option<&Entry> {
        if path.is_empty() {
            Some(&Entry::Dir)
        } else {
            self.entries.get(path)
        }
    }

    /// Resolves the links of a path, including the last one if requested.
    pub(crate) fn resolve(&self, path: &str, follow_last: bool) -> Result<String, Problem> {
        let mut todo: Vec<String> = path.split('/').rev().map(str::to_owned).collect();
        let mut done: Vec<String> = Vec::new();
        let mut links = 0;
        while let Some(segment) = todo.pop() {
            match segment.as_str() {
                "" | "." => continue,
                ".." if done.pop().is_none() => return Err(self.escapes(path)),
                ".." => continue,
                _ => done.push(segment),
            }
            let here = done.join("/");
            match self.get(&here) {
                Some(Entry::Link(target)) if follow_last || !todo.is_empty() => {
                    links += 1;
                    if links > LINKS_MAX {
                        return Err(Problem::unavailable(
                            "too-many-links",
                            format!("{path}: too many links"),
                        ));
                    }
                    done.pop();
                    let below_root = target.strip_prefix(self.mount);
                    if below_root.is_some() {
                        done.clear();
                    }
                    todo.extend(
                        below_root
                            .unwrap_or(target)
                            .split('/')
                            .rev()
                            .map(str::to_owned),
                    );
                }
                Some(Entry::File(_)) if !todo.is_empty() => return Err(self.missing(path)),
                Some(_) => {}
                None => return Err(self.missing(path)),
            }
        }
        Ok(done.join("/"))
    }

    pub(crate) fn read(&self, path: &str) -> Result<&[u8], Problem> {
        match self.get(&self.resolve(path, true)?) {
            Some(Entry::File(content)) => Ok(content),
            _ => Err(Problem::invalid(
                "not-a-file",
                format!("{path} is not a regular file"),
            )),
        }
    }

    pub(crate) fn read_link(&self, path: &str) -> Result<String, Problem> {
        match self.get(&self.resolve(path, false)?) {
            Some(Entry::Link(_)) => self.resolve(path, true),
            _ => Err(Problem::invalid(
                "not-a-link",
                format!("{path} is not a link"),
            )),
        }
    }

    pub(crate) fn read_dir(&self, path: &str) -> Result<Vec<String>, Problem> {
        let resolved = self.resolve(path, true)?;
        match self.get(&resolved) {
            Some(Entry::Dir) => Ok(self.names(&resolved)),
            _ => Err(Problem::invalid(
                "not-a-directory",
                format!("{path} is not a directory"),
            )),
        }
    }

    /// Walks over the names only, not over what is in them: every directory has an entry of its own.
    fn names(&self, directory: &str) -> Vec<String> {
        let inside = if directory.is_empty() {
            String::new()
        } else {
            format!("{directory}/")
        };
        let mut names = Vec::new();
        let mut next = Bound::Excluded(inside.clone());
        while let Some((path, _)) = self.entries.range((next, Bound::Unbounded)).next() {
            let Some(name) = path.strip_prefix(&inside) else {
                break;
            };
            next = match name.split_once('/') {
                None => {
                    names.push(name.to_owned());
                    Bound::Excluded(path.clone())
                }
                Some((child, _)) => Bound::Included(after_content(&format!("{inside}{child}"))),
            };
        }
        names
    }

    fn missing(&self, path: &str) -> Problem {
        Problem::not_found(
            "no-such-path",
            format!("{}{path} does not exist", self.mount),
        )
    }

    fn escapes(&self, path: &str) -> Problem {
        Problem::denied(
            "outside-sysfs",
            format!("{path} leads out of {}", self.mount),
        )
    }

    /// Paths as a walk from the root sees them, links kept.
    pub(crate) fn glob(&self, pattern: &str) -> Result<Vec<String>, Problem> {
        matcher(pattern)?;
        let segments: Vec<_> = pattern.split('/').collect();
        let mut found = Vec::new();
        self.walk("", &segments, &mut found)?;
        found.sort();
        found.dedup();
        Ok(found)
    }

    fn walk(
        &self,
        directory: &str,
        segments: &[&str],
        found: &mut Vec<String>,
    ) -> Result<(), Problem> {
        let Some((first, rest)) = segments.split_first() else {
            found.push(directory.to_owned());
            return Ok(());
        };
        if *first == "**" {
            self.walk(directory, rest, found)?;
        }
        let below = |name: &str| {
            if directory.is_empty() {
                name.to_owned()
            } else {
                format!("{directory}/{name}")
            }
        };
        if !first.contains(['*', '?', '[', '{', '\\']) {
            let path = below(first);
            return if self.resolve(&path, false).is_ok() {
                self.walk(&path, rest, found)
            } else {
                Ok(())
            };
        }
        let segment = matcher(if *first == "**" { "*" } else { first })?;
        for name in self.read_dir(directory).unwrap_or_default() {
            let path = below(&name);
            match *first {
                "**" if self.is_link(&path) => {}
                "**" => self.walk(&path, segments, found)?,
                _ if segment.is_match(&name) => self.walk(&path, rest, found)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn is_link(&self, path: &str) -> bool {
        let resolved = self.resolve(path, false).ok();
        matches!(
            resolved.and_then(|path| self.get(&path)),
            Some(Entry::Link(_))
        )
    }
}

/// Returns the first path that sorts after everything in a directory: `0` follows the slash in ASCII.
fn after_content(directory: &str) -> String {
    format!("{directory}0")
}

/// Compiles a glob by the host's rules.
pub(crate) fn matcher(glob: &str) -> Result<GlobMatcher, Problem> {
    let compiled =
        compile(glob).map_err(|why| Problem::invalid("bad-glob", format!("{glob:?}: {why}")))?;
    Ok(compiled.compile_matcher())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ProblemKind;

    fn tree() -> Tree {
        let mut tree = Tree::new("/sys/");
        tree.insert(
            "devices/pci0000:00/0000:00:01.0/vendor",
            Entry::File(b"0x1af4".into()),
        );
        tree.insert(
            "devices/pci0000:00/0000:00:01.0/drm/card0/dev",
            Entry::File(b"226:0".into()),
        );
        tree.insert(
            "devices/pci0000:00/0000:00:01.0/driver",
            Entry::Link("../../../bus/pci/drivers/gpu".into()),
        );
        tree.insert("bus/pci/drivers/gpu", Entry::Dir);
        tree.insert(
            "bus/pci/devices/0000:00:01.0",
            Entry::Link("../../../devices/pci0000:00/0000:00:01.0".into()),
        );
        tree
    }

    #[test]
    fn files_are_read_through_links() {
        assert_eq!(
            tree().read("bus/pci/devices/0000:00:01.0/vendor").unwrap(),
            b"0x1af4"
        );
    }

    #[test]
    fn link_is_returned_as_target_path() {
        let tree = tree();
        let device = tree.read_link("bus/pci/devices/0000:00:01.0").unwrap();
        assert_eq!(device, "devices/pci0000:00/0000:00:01.0");
        let driver = tree
            .read_link("bus/pci/devices/0000:00:01.0/driver")
            .unwrap();
        assert_eq!(driver, "bus/pci/drivers/gpu");
    }

    #[test]
    fn globs_follow_links_under_requested_name() {
        let found = tree().glob("bus/pci/devices/*/drm/*/dev").unwrap();
        assert_eq!(found, ["bus/pci/devices/0000:00:01.0/drm/card0/dev"]);
        assert_eq!(
            tree().glob("devices/**/dev").unwrap(),
            ["devices/pci0000:00/0000:00:01.0/drm/card0/dev"]
        );
        assert_eq!(tree().glob("class/*").unwrap(), Vec::<String>::new());
    }

    #[test]
    fn missing_path_is_not_found() {
        for path in ["nowhere", "devices/pci0000:00/0000:00:01.0/vendor/x"] {
            assert_eq!(
                tree().read(path).unwrap_err().kind,
                ProblemKind::NotFound,
                "{path}"
            );
        }
    }

    #[test]
    fn escaping_and_circular_links_are_refused() {
        let mut tree = tree();
        tree.insert("out", Entry::Link("../etc/shadow".into()));
        tree.insert("a", Entry::Link("b".into()));
        tree.insert("b", Entry::Link("a".into()));
        assert_eq!(tree.read("out").unwrap_err().code, "outside-sysfs");
        assert_eq!(tree.read("a").unwrap_err().code, "too-many-links");
    }

    #[test]
    fn wrong_entry_kind_is_refused() {
        let tree = tree();
        assert_eq!(tree.read("bus/pci").unwrap_err().code, "not-a-file");
        assert_eq!(tree.read_link("bus/pci").unwrap_err().code, "not-a-link");
        assert_eq!(
            tree.read_dir("bus/pci/devices/0000:00:01.0/vendor")
                .unwrap_err()
                .code,
            "not-a-directory"
        );
    }

    #[test]
    fn directory_lists_only_its_entries() {
        let mut tree = Tree::new("/sys/");
        for path in ["a/x/y/z", "a/x-1", "a/x.1/y", "a/x0", "a-b/c", "a0"] {
            tree.insert(path, Entry::Dir);
        }
        assert_eq!(tree.read_dir("a").unwrap(), ["x", "x-1", "x.1", "x0"]);
        assert_eq!(tree.read_dir("a/x/y").unwrap(), ["z"]);
        assert_eq!(tree.read_dir("a/x0").unwrap(), Vec::<String>::new());
        assert_eq!(tree.names(""), ["a", "a-b", "a0"]);
        tree.remove("a/x");
        assert_eq!(tree.read_dir("a").unwrap(), ["x-1", "x.1", "x0"]);
    }

    #[test]
    fn removal_takes_only_own_content() {
        let mut tree = tree();
        tree.insert("devices/pci0000:00/0000:00:01.01", Entry::Dir);
        tree.remove("devices/pci0000:00/0000:00:01.0");
        assert_eq!(
            tree.read_dir("devices/pci0000:00").unwrap(),
            ["0000:00:01.01"]
        );
        assert_eq!(
            tree.read("bus/pci/devices/0000:00:01.0/vendor")
                .unwrap_err()
                .kind,
            ProblemKind::NotFound
        );
    }
}

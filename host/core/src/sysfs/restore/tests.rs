use std::os::unix::fs::{MetadataExt, symlink};
use std::path::PathBuf;

use super::*;

/// A tree of two attributes, with what drivers may not write beside them.
struct Tree {
    directory: tempfile::TempDir,
    tree: SysfsTree,
}

impl Tree {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        for (path, value) in [
            ("devices/led/brightness", "0\n"),
            ("devices/led/trigger", "none [timer] disk\n"),
        ] {
            let path = directory.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, value).unwrap();
        }
        std::fs::create_dir_all(directory.path().join("devices/led/power")).unwrap();
        std::fs::write(directory.path().join("devices/led/power/control"), "1\n").unwrap();
        let tree = SysfsTree::new(SysfsRoot::open(directory.path()).unwrap());
        Self { directory, tree }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    fn is(&self, path: &str) -> String {
        std::fs::read_to_string(self.path(path)).unwrap()
    }

    /// Returns the value as the host keeps it.
    fn kept(&self, path: &str, before: &str, after: &str) -> KeptValue {
        KeptValue {
            path: path.to_owned(),
            inode: std::fs::metadata(self.path(path)).unwrap().ino(),
            order: 1,
            before: Some(before.to_owned()),
            after: Some(after.to_owned()),
            pending: None,
            putting_back: false,
            also_left: Vec::new(),
            restored_from: None,
        }
    }

    async fn left(&self, kept: &KeptValue) -> String {
        let fate = self.tree.restore(kept, false).await;
        assert_eq!(fate.end, PutBackEnd::Left, "{fate:?}");
        fate.problem.unwrap().code
    }
}

const LED: &str = "devices/led/brightness";

#[tokio::test]
async fn unchanged_value_is_restored_once() {
    let tree = Tree::new();
    std::fs::write(tree.path(LED), "7\n").unwrap();
    let kept = tree.kept(LED, "0", "7");
    let dry = tree.tree.restore(&kept, true).await;
    assert_eq!(
        (dry.end, dry.found.as_deref()),
        (PutBackEnd::Possible, Some("7"))
    );
    assert_eq!(tree.is(LED), "7\n", "a question changes nothing");
    let done = tree.tree.restore(&kept, false).await;
    assert_eq!(
        (done.end, done.found.as_deref(), done.problem),
        (PutBackEnd::PutBack, Some("7"), None)
    );
    assert_eq!(tree.is(LED), "0\n");
    let again = tree.tree.restore(&kept, false).await;
    assert_eq!(
        (again.end, again.found.as_deref()),
        (PutBackEnd::AsBefore, Some("0"))
    );
}

#[tokio::test]
async fn pending_write_counts_if_present() {
    let tree = Tree::new();
    std::fs::write(tree.path(LED), "7\n").unwrap();
    let open = KeptValue {
        after: None,
        pending: Some("7\n".into()),
        ..tree.kept(LED, "0", "")
    };
    assert_eq!(
        tree.tree.restore(&open, false).await.end,
        PutBackEnd::PutBack
    );
    let older = KeptValue {
        pending: Some("9".into()),
        ..tree.kept(LED, "1", "0")
    };
    assert_eq!(
        tree.tree.restore(&older, true).await.end,
        PutBackEnd::Possible,
        "it was not made"
    );
}

#[tokio::test]
async fn foreign_or_missing_value_is_kept() {
    let tree = Tree::new();
    let kept = tree.kept(LED, "0", "7");
    std::fs::write(tree.path(LED), "3\n").unwrap();
    assert_eq!(tree.left(&kept).await, "value-changed");
    assert_eq!(tree.is(LED), "3\n");

    // Another file under the same path, as of a device that was plugged in again.
    std::fs::write(tree.path("new"), "7\n").unwrap();
    std::fs::rename(tree.path("new"), tree.path(LED)).unwrap();
    assert_eq!(tree.left(&kept).await, "path-replaced");
    std::fs::remove_file(tree.path(LED)).unwrap();
    assert_eq!(tree.left(&kept).await, "path-gone");
    std::fs::create_dir(tree.path(LED)).unwrap();
    assert_eq!(tree.left(&kept).await, "not-a-file");
}

#[tokio::test]
async fn forbidden_value_is_not_restored() {
    let tree = Tree::new();
    let denied = tree.kept("devices/led/power/control", "0", "1");
    assert_eq!(tree.left(&denied).await, "never-allowed");
    assert_eq!(tree.is("devices/led/power/control"), "1\n");

    let outside = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(outside.path(), "7\n").unwrap();
    let kept = tree.kept(LED, "0", "7");
    std::fs::remove_file(tree.path(LED)).unwrap();
    symlink(outside.path(), tree.path(LED)).unwrap();
    assert_eq!(tree.left(&kept).await, "outside-sysfs");
    std::fs::remove_file(tree.path(LED)).unwrap();
    symlink("trigger", tree.path(LED)).unwrap();
    assert_eq!(
        tree.left(&kept).await,
        "path-replaced",
        "a link that was none"
    );
    let escape = KeptValue {
        path: "../outside".into(),
        ..kept
    };
    assert_eq!(tree.left(&escape).await, "bad-path");
    assert_eq!(std::fs::read_to_string(outside.path()).unwrap(), "7\n");
}

#[tokio::test]
async fn unreadable_value_is_reported() {
    let tree = Tree::new();
    let blind = KeptValue {
        before: None,
        ..tree.kept(LED, "", "0")
    };
    assert_eq!(tree.left(&blind).await, "value-unknown");
    let kept = tree.kept(LED, "1", "0");
    std::fs::write(tree.path(LED), [0xff, 0xfe]).unwrap();
    assert_eq!(tree.left(&kept).await, "value-unreadable");
}

/// A file of a test keeps the rest of a longer value, as no attribute does. The value that it then reads as is reported.
#[tokio::test]
async fn differently_read_value_is_reported() {
    let tree = Tree::new();
    std::fs::write(tree.path(LED), "100\n").unwrap();
    let fate = tree.tree.restore(&tree.kept(LED, "5", "100"), false).await;
    assert_eq!(
        (fate.end, fate.problem.unwrap().code.as_str()),
        (PutBackEnd::PutBack, "value-reads-otherwise")
    );
}

#[test]
fn only_the_selected_choice_is_written() {
    for (before, now, written) in [
        (
            "none [timer] heartbeat",
            "[none] timer heartbeat",
            Some("timer"),
        ),
        (
            "[none] mq-deadline kyber",
            "[mq-deadline] kyber none",
            Some("none"),
        ),
        (
            "none [timer] heartbeat",
            "none timer [heartbeat]",
            Some("timer"),
        ),
        // Texts, and lists whose choices are others now.
        ("rack 7 [db]", "rack 8 [db]", None),
        ("rack 7 [db]", "db", None),
        ("none [timer] heartbeat", "[none] timer", None),
        ("none [timer]", "none timer", None),
        ("[a]", "[a]", None),
        ("[a] [b]", "a [b]", None),
        ("a [] b", "[a] b", None),
        ("plain text", "plain text", None),
    ] {
        assert_eq!(chosen(before, now), written, "{before:?} {now:?}");
    }
}

#[test]
fn selected_choice_survives_changed_list() {
    for (before, now, written) in [
        (
            "none [timer] heartbeat",
            "[none] timer heartbeat battery",
            Some("timer"),
        ),
        ("none [timer] heartbeat", "[none] heartbeat", None),
        ("rack 7 [db]", "db", None),
        ("plain text", "[none] plain", None),
    ] {
        assert_eq!(still_listed(before, now), written, "{before:?} {now:?}");
    }
}

#[tokio::test]
async fn bracketed_text_is_restored_whole() {
    // A kernel takes a value as a whole, and a file of a test does not.
    let files = Tree::new();
    let root = SysfsRoot::open_simulated(files.directory.path()).unwrap();
    let tree = Tree {
        tree: SysfsTree::new(root),
        ..files
    };
    for now in ["rack 8 [web]", "rack [7] db", "[rack] 7 db", ""] {
        std::fs::write(tree.path(LED), format!("{now}\n")).unwrap();
        let fate = tree
            .tree
            .restore(&tree.kept(LED, "rack 7 [db]", now), false)
            .await;
        assert_eq!(
            (fate.end, fate.problem),
            (PutBackEnd::PutBack, None),
            "{now:?}"
        );
        assert_eq!(fate.written.as_deref(), Some("rack 7 [db]"));
        assert_eq!(tree.is(LED), "rack 7 [db]\n", "{now:?}");
    }
}

proptest::proptest! {
    /// A list of choices is written by its chosen word, and nothing but a list with the same choices is taken for one.
    #[test]
    fn only_equal_choices_form_a_list(
        before in proptest::collection::vec("[a-c\\[\\]]{1,4}", 0..5),
        now in proptest::collection::vec("[a-c\\[\\]]{1,4}", 0..5),
    ) {
        let bare = |words: &[String]| {
            let mut all: Vec<_> = words.iter().map(|word| {
                let inner = word.strip_prefix('[').and_then(|word| word.strip_suffix(']'));
                inner.unwrap_or(word).to_owned()
            }).collect();
            all.sort();
            all
        };
        let in_brackets = |words: &[String]| words.iter().filter(|word| word.len() > 1 && word.starts_with('[') && word.ends_with(']')).count();
        let (was, is) = (before.join(" "), now.join(" "));
        if let Some(word) = chosen(&was, &is) {
            proptest::prop_assert!(before.iter().any(|found| found.trim_matches(['[', ']']) == word));
            proptest::prop_assert_eq!(bare(&before), bare(&now));
            proptest::prop_assert_eq!((in_brackets(&before), in_brackets(&now)), (1, 1));
        }
        // Another choice of the same list.
        let choices: Vec<_> = before.iter().filter(|word| !word.contains(['[', ']'])).cloned().collect();
        if choices.len() > 1 {
            let with = |at: usize| {
                let mut words = choices.clone();
                words[at] = format!("[{}]", words[at]);
                words.join(" ")
            };
            let (was, is) = (with(0), with(choices.len() - 1));
            proptest::prop_assert_eq!(chosen(&was, &is), Some(choices[0].as_str()));
        }
    }
}

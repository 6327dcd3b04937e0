//! The directory.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::*;

const DAEMON: &str = "/var/lib/nodedock/checkpoint.db";

struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("run/cdi")
    }

    fn open(&self) -> CdiDir {
        CdiDir::open(&self.path(), &[], DAEMON).unwrap()
    }

    fn put(&self, name: &str, text: &str) {
        std::fs::create_dir_all(self.path()).unwrap();
        std::fs::write(self.path().join(name), text).unwrap();
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path()).unwrap();
        let mut names: Vec<_> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    fn inode(&self, name: &str) -> u64 {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(self.path().join(name)).unwrap().ino()
    }
}

fn file(uid: &str, value: &str) -> SpecFile {
    rendered(&claim_with_uid(uid, one(with_env("A", value))))
}

async fn collisions(dir: &CdiDir, names: &[String]) -> Vec<Collision> {
    dir.survey().await.unwrap();
    dir.collisions(names)
}

#[tokio::test]
async fn files_have_configured_mode_and_group() {
    use std::os::unix::fs::MetadataExt;
    let home = Home::new();
    let open = |access| CdiDir::open_with(&home.path(), &[], DAEMON, access);
    let found = |name: &str| {
        let found = std::fs::metadata(home.path().join(name)).unwrap();
        (found.mode() & 0o7777, found.gid())
    };
    let own = rustix::process::getegid().as_raw();
    home.put("theirs.yaml", "cdiVersion: 0.6.0\n");
    let of_another = found("theirs.yaml");
    home.open().write(vec![file("a", "1")]).await.unwrap();
    for mode in [0o600, 0o640, 0o644] {
        let dir = open(FileAccess::new(mode, Some(own)).unwrap()).unwrap();
        assert_eq!(
            found("gpu.example.com_a.yaml"),
            (mode, own),
            "a file from before"
        );
        dir.write(vec![file("b", &mode.to_string())]).await.unwrap();
        assert_eq!(found("gpu.example.com_b.yaml"), (mode, own));
    }
    if rustix::process::geteuid().is_root() {
        open(FileAccess::new(0o640, Some(991)).unwrap()).unwrap();
        assert_eq!(found("gpu.example.com_a.yaml"), (0o640, 991));
        open(FileAccess::default()).unwrap();
        assert_eq!(
            found("gpu.example.com_a.yaml"),
            (0o644, 991),
            "no group is set"
        );
    }
    assert_eq!(found("theirs.yaml"), of_another);
    assert_eq!(home.names().len(), 3, "no temporary file is left");
}

#[tokio::test]
async fn files_are_written_listed_and_removed() {
    let home = Home::new();
    let dir = home.open();
    dir.write(vec![file("b", "1"), file("a", "1")])
        .await
        .unwrap();
    let mode = |path: PathBuf| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(
        (
            mode(home.path()),
            mode(home.path().join("gpu.example.com_a.yaml"))
        ),
        (0o755, 0o644)
    );
    let ours = dir.list_ours().unwrap();
    let uids: Vec<_> = ours
        .iter()
        .map(|file| file.identity.as_ref().unwrap().claim.uid.as_str())
        .collect();
    assert_eq!(uids, ["a", "b"]);
    dir.remove(vec![ours[0].name.clone(), "never-there.yaml".to_owned()])
        .await
        .unwrap();
    assert_eq!(home.names(), ["gpu.example.com_b.yaml"]);
}

#[tokio::test]
async fn concurrent_callers_are_all_served() {
    let home = Home::new();
    let dir = home.open();
    let names: Vec<_> = (0..64).map(|n| format!("u{n}")).collect();
    let writes = names.iter().map(|uid| dir.write(vec![file(uid, "1")]));
    for outcome in futures::future::join_all(writes).await {
        outcome.unwrap();
    }
    assert_eq!(home.names().len(), 64);
    let removes = names
        .iter()
        .map(|uid| dir.remove(vec![file(uid, "1").name]));
    for outcome in futures::future::join_all(removes).await {
        outcome.unwrap();
    }
    assert!(home.names().is_empty());
}

#[tokio::test]
async fn unchanged_file_is_not_rewritten() {
    let home = Home::new();
    let dir = home.open();
    let (same, other) = (file("a", "1"), file("a", "2"));
    dir.write(vec![same.clone()]).await.unwrap();
    let inode = home.inode(&same.name);
    dir.write(vec![same.clone()]).await.unwrap();
    assert_eq!(home.inode(&same.name), inode);
    // Nor by the next daemon, which has to read it once.
    let next = home.open();
    assert!(next.is_current(&same) && !next.is_current(&other));
    next.write(vec![same.clone()]).await.unwrap();
    assert_eq!(home.inode(&same.name), inode);
    next.write(vec![other.clone()]).await.unwrap();
    assert!(next.is_current(&other) && !next.is_current(&same));
    assert!(dir.is_current(&other));
}

#[tokio::test]
async fn missing_or_altered_file_is_rewritten() {
    let home = Home::new();
    let dir = home.open();
    let file = file("a", "1");
    assert!(!dir.is_current(&file));
    dir.write(vec![file.clone()]).await.unwrap();
    assert!(dir.is_current(&file));
    std::fs::write(home.path().join(&file.name), "# nodedock.dev/claim: cut").unwrap();
    assert!(!dir.is_current(&file));
    dir.write(vec![file.clone()]).await.unwrap();
    std::fs::remove_file(home.path().join(&file.name)).unwrap();
    assert!(!dir.is_current(&file));
    dir.write(vec![file.clone()]).await.unwrap();
    assert!(dir.is_current(&file));
    // What a power loss may leave of a file.
    std::fs::write(home.path().join(&file.name), "").unwrap();
    dir.write(vec![file.clone()]).await.unwrap();
    assert!(dir.is_current(&file));
}

/// Claims could not be unprepared while the directory was missing, since its sync failed and only a write created it again.
#[tokio::test]
async fn remove_succeeds_without_the_directory() {
    let home = Home::new();
    let dir = home.open();
    dir.write(vec![file("a", "1")]).await.unwrap();
    std::fs::remove_dir_all(home.path()).unwrap();
    dir.remove(vec!["gpu.example.com_a.yaml".to_owned()])
        .await
        .unwrap();
    dir.write(vec![file("b", "1")]).await.unwrap();
    assert_eq!(home.names(), ["gpu.example.com_b.yaml"]);
}

#[tokio::test]
async fn files_of_others_are_not_ours() {
    let home = Home::new();
    let name = file("a", "1").name;
    home.put("nvidia.yaml", "kind: nvidia.com/gpu\n");
    home.put(&name, "# another program's\n");
    home.put("short.json", "{");
    std::os::unix::fs::symlink("/etc/passwd", home.path().join("link.yaml")).unwrap();
    let before = home.names();
    let dir = home.open();
    assert!(dir.list_ours().unwrap().is_empty());
    assert!(matches!(
        dir.write(vec![file("a", "1")]).await,
        Err(CdiError::Foreign(_))
    ));
    assert!(matches!(
        dir.remove(vec![name]).await,
        Err(CdiError::Foreign(_))
    ));
    assert!(matches!(
        dir.remove(vec!["link.yaml".to_owned()]).await,
        Err(CdiError::Foreign(_))
    ));
    for bad in ["../x.yaml", ".x.yaml", "x.txt", "a/b.yaml"] {
        assert!(
            matches!(
                dir.remove(vec![bad.to_owned()]).await,
                Err(CdiError::Name(_))
            ),
            "{bad}"
        );
    }
    assert_eq!(home.names(), before);
}

#[tokio::test]
async fn refused_file_does_not_block_others() {
    let home = Home::new();
    home.put(&file("b", "1").name, "# another program's\n");
    let dir = home.open();
    let (bad, good) = tokio::join!(
        dir.write(vec![file("a", "1"), file("b", "1")]),
        dir.write(vec![file("c", "1")])
    );
    assert!(bad.is_err());
    good.unwrap();
    assert_eq!(
        home.names(),
        ["gpu.example.com_b.yaml", "gpu.example.com_c.yaml"]
    );
}

#[tokio::test]
async fn leftover_temporary_files_are_removed() {
    let home = Home::new();
    home.put(".nodedock-cb1cffee-7-1.tmp", "half");
    home.put(".other.tmp", "theirs");
    home.open();
    assert_eq!(home.names(), [".other.tmp"]);
}

#[tokio::test]
async fn unknown_identity_version_is_still_ours() {
    let home = Home::new();
    home.put("x.yaml", "# nodedock.dev/claim: {\"version\":99}\n{}\n");
    let dir = home.open();
    let ours = dir.list_ours().unwrap();
    assert_eq!(
        (
            ours.len(),
            ours[0].identity.is_none(),
            ours[0].spec.as_str()
        ),
        (1, true, "{}\n")
    );
    dir.remove(vec!["x.yaml".to_owned()]).await.unwrap();
    assert!(home.names().is_empty());
}

#[tokio::test]
async fn foreign_device_name_collision_is_found() {
    let home = Home::new();
    let dir = home.open();
    let record = claim_with_uid("a", one(with_env("A", "1")));
    let names: Vec<_> = cdi_devices(&record, &driver())
        .into_iter()
        .flat_map(|(_, names)| names)
        .collect();
    dir.write(vec![rendered(&record)]).await.unwrap();
    assert_eq!(collisions(&dir, &names).await, []);

    home.put("broken.yaml", "kind: [");
    home.put(
        "theirs.yaml",
        "cdiVersion: 0.5.0\nkind: gpu.example.com/claim\ndevices:\n- name: a-gpu-0\n",
    );
    let expected = Collision {
        device: "gpu.example.com/claim=a-gpu-0".to_owned(),
        file: home.path().join("theirs.yaml"),
    };
    assert_eq!(
        collisions(&dir, &names).await,
        std::slice::from_ref(&expected)
    );
    // Our own changes are no reason to look again, nor to forget.
    dir.write(vec![file("b", "1")]).await.unwrap();
    assert_eq!(collisions(&dir, &names).await, [expected]);
    std::fs::remove_file(home.path().join("theirs.yaml")).unwrap();
    assert_eq!(collisions(&dir, &names).await, []);
}

#[tokio::test]
async fn daemons_keep_each_others_files() {
    let home = Home::new();
    let (one, file) = (home.open(), file("a", "1"));
    let two = CdiDir::open(&home.path(), &[], "/elsewhere/\"checkpoint\".db").unwrap();
    one.write(vec![file.clone()]).await.unwrap();
    assert_eq!(
        (
            one.list_ours().unwrap().len(),
            two.list_ours().unwrap().len()
        ),
        (1, 0)
    );
    assert!(one.is_current(&file) && !two.is_current(&file));
    assert!(matches!(
        two.write(vec![file.clone()]).await,
        Err(CdiError::Foreign(_))
    ));
    assert!(matches!(
        two.remove(vec![file.name.clone()]).await,
        Err(CdiError::Foreign(_))
    ));
    let device = "gpu.example.com/claim=a-gpu-0".to_owned();
    let named = async |dir: &CdiDir| collisions(dir, std::slice::from_ref(&device)).await.len();
    assert_eq!((named(&one).await, named(&two).await), (0, 1));
    one.remove(vec![file.name.clone()]).await.unwrap();
    two.write(vec![file.clone()]).await.unwrap();
    assert!(two.list_ours().unwrap()[0].identity.is_some());
}

#[tokio::test]
async fn truncated_own_file_is_rewritten() {
    let home = Home::new();
    let (dir, file) = (home.open(), file("a", "1"));
    dir.write(vec![file.clone()]).await.unwrap();
    let path = home.path().join(&file.name);
    let whole = std::fs::read(&path).unwrap();
    for length in [25, 40, whole.len() / 2] {
        std::fs::write(&path, &whole[..length]).unwrap();
        dir.write(vec![file.clone()]).await.unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), whole, "cut to {length}");
    }
}

const DEVICE: &str = "gpu.example.com/claim=a-gpu-0";
const THEIRS: &str = "cdiVersion: 0.5.0\nkind: gpu.example.com/claim\ndevices:\n- name: a-gpu-0\n";

/// Runtimes use, of two files with a device, the one in the later directory. They refuse the device if both files are in one directory.
#[tokio::test]
async fn only_later_directories_cause_collisions() {
    let home = Home::new();
    let directory = |name: &str| home.0.path().join(name);
    ["before", "after"]
        .iter()
        .for_each(|name| std::fs::create_dir(directory(name)).unwrap());
    let directories = [
        directory("before"),
        directory("run/cdi"),
        directory("after"),
        directory("absent"),
    ];
    let dir = CdiDir::open(&home.path(), &directories, DAEMON).unwrap();
    let (device, other) = (DEVICE.to_owned(), "v/c=other".to_owned());
    std::fs::write(directory("before/a.yaml"), THEIRS).unwrap();
    assert_eq!(collisions(&dir, std::slice::from_ref(&device)).await, []);
    assert_eq!(
        dir.missing(&[device.clone(), other.clone()]),
        std::slice::from_ref(&other)
    );
    std::fs::write(directory("after/a.yaml"), THEIRS).unwrap();
    let found = collisions(&dir, std::slice::from_ref(&device)).await;
    assert_eq!(
        found,
        [Collision {
            device: device.clone(),
            file: directory("after/a.yaml")
        }]
    );
    std::fs::remove_dir_all(directory("after")).unwrap();
    assert_eq!(collisions(&dir, std::slice::from_ref(&device)).await, []);
    std::fs::create_dir(directory("absent")).unwrap();
    std::fs::write(
        directory("absent/b.json"),
        r#"{"kind": "v/c", "devices": [{"name": "other"}]}"#,
    )
    .unwrap();
    dir.survey().await.unwrap();
    assert_eq!(dir.missing(&[other]), [] as [String; 0]);
}

/// `/var/run/cdi` and `/run/cdi` are one directory on most nodes: what we wrote was found to collide with itself.
#[tokio::test]
async fn own_directory_alias_causes_no_collision() {
    let home = Home::new();
    std::fs::create_dir_all(home.path()).unwrap();
    let link = home.0.path().join("link");
    std::os::unix::fs::symlink(home.path(), &link).unwrap();
    let directories = [home.path(), link.clone()];
    for (path, directories) in [(&home.path(), &directories), (&link, &directories)] {
        let dir = CdiDir::open(path, directories, DAEMON).unwrap();
        dir.write(vec![file("a", "1")]).await.unwrap();
        assert_eq!(
            collisions(&dir, &[DEVICE.to_owned()]).await,
            [],
            "{}",
            path.display()
        );
    }
}

#[tokio::test]
async fn file_altered_in_place_is_reread() {
    let home = Home::new();
    let dir = home.open();
    let device = [DEVICE.to_owned()];
    home.put("theirs.yaml", "kind: gpu.example.com/claim\ndevices: []\n");
    assert_eq!(collisions(&dir, &device).await, []);
    home.put("theirs.yaml", THEIRS);
    let touched = dir
        .touched(vec![
            "theirs.yaml".to_owned(),
            "never-there.yaml".to_owned(),
        ])
        .await;
    assert_eq!((touched.devices.len(), touched.ours.len()), (1, 0));
    assert_eq!(dir.collisions(&device).len(), 1);
    home.put(
        "theirs.yaml",
        "kind: gpu.example.com/claim\ndevices: []\n# other\n",
    );
    dir.survey_all().unwrap();
    assert_eq!(dir.collisions(&device), []);
    std::fs::remove_file(home.path().join("theirs.yaml")).unwrap();
    assert_eq!(
        dir.touched(vec!["theirs.yaml".to_owned()]).await,
        Touched::default()
    );
}

#[tokio::test]
async fn foreign_changes_are_distinguished_from_own() {
    let home = Home::new();
    let (dir, file) = (home.open(), file("a", "1"));
    assert!(dir.is_as_left(&file.name), "it is not there, and was not");
    dir.write(vec![file.clone()]).await.unwrap();
    assert!(dir.is_as_left(&file.name));
    // In place and of the same size, possibly within a tick of the file system's clock.
    let path = home.path().join(&file.name);
    let altered = std::fs::read_to_string(&path)
        .unwrap()
        .replace("A=1", "A=2");
    std::fs::write(&path, altered).unwrap();
    assert!(!dir.is_as_left(&file.name));
    dir.write(vec![file.clone()]).await.unwrap();
    assert!(dir.is_as_left(&file.name));
    std::fs::write(&path, "short").unwrap();
    assert!(!dir.is_as_left(&file.name));
    std::fs::remove_file(home.path().join(&file.name)).unwrap();
    assert!(!dir.is_as_left(&file.name));
    dir.remove(vec![file.name.clone()]).await.unwrap();
    assert!(dir.is_as_left(&file.name));
    home.put("theirs.yaml", THEIRS);
    dir.survey().await.unwrap();
    std::fs::remove_file(home.path().join("theirs.yaml")).unwrap();
    assert!(!dir.is_as_left("theirs.yaml"), "it was read");
}

#[tokio::test]
async fn copies_of_our_files_are_strays() {
    let home = Home::new();
    let (dir, file) = (home.open(), file("a", "1"));
    dir.write(vec![file.clone()]).await.unwrap();
    std::fs::copy(home.path().join(&file.name), home.path().join("copy.yaml")).unwrap();
    dir.survey().await.unwrap();
    assert_eq!(dir.strays(), ["copy.yaml"]);
    assert_eq!(
        dir.read("copy.yaml")
            .await
            .unwrap()
            .unwrap()
            .identity
            .unwrap()
            .claim
            .uid
            .as_str(),
        "a"
    );
    assert_eq!(dir.read("never-there.yaml").await.unwrap(), None);
    assert_eq!(
        file_of(&file.name),
        Some((driver(), Uid::new("a").unwrap()))
    );
    for bad in [
        "copy.yaml",
        "gpu.example.com_a.json",
        "-gpu_a.yaml",
        "gpu.example.com_.yaml",
    ] {
        assert_eq!(file_of(bad), None, "{bad}");
    }
}

#[tokio::test]
async fn foreign_file_does_not_block_removal() {
    let home = Home::new();
    let (dir, ours) = (home.open(), file("a", "1"));
    dir.write(vec![ours.clone()]).await.unwrap();
    home.put("theirs.yaml", "# by hand\n");
    let removed = dir.remove(vec!["theirs.yaml".to_owned(), ours.name]).await;
    assert!(matches!(removed, Err(CdiError::Foreign(_))));
    assert_eq!(home.names(), ["theirs.yaml"]);
}

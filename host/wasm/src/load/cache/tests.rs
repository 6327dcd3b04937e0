use std::os::unix::fs::{chown, symlink};
use std::time::Duration;

use bytes::Bytes;

use super::*;
use crate::engine;
use crate::load::admission::Surface;
use crate::load::artifact::{self, Report, Spent, memory_file};
use crate::load::compile::Compiler;
use crate::tests::guest::Guest;

/// A cache and a driver of which it has the code.
struct Scene {
    directory: tempfile::TempDir,
    engine: Engine,
    key: Key,
    source: Bytes,
}

impl Scene {
    fn new() -> Self {
        let engine = engine::for_compiling(true).unwrap();
        let source = Bytes::from(Guest::default().component());
        let key = Key::new(&engine, &source);
        Self {
            directory: tempfile::tempdir().unwrap(),
            engine,
            key,
            source,
        }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("cache")
    }

    fn paths(&self) -> CachePaths {
        CachePaths::inside(self.directory.path())
    }

    fn open(&self) -> Cache {
        Cache::open(&self.paths(), &self.engine).unwrap()
    }

    fn file(&self, cache: &Cache) -> PathBuf {
        self.path().join(cache.name(&self.key))
    }

    async fn fill(&self, cache: &Cache) {
        let compiled = Compiler::InProcess
            .compile(self.key, self.source.clone())
            .await
            .unwrap();
        cache.put(&self.key, compiled).map(&self.engine).unwrap();
    }
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

/// An artifact that says it is of this key.
fn empty_artifact(key: &Key, refusal: Option<crate::LoadError>) -> Artifact {
    let file = memory_file().unwrap();
    let spent = Spent {
        cpu_ms: 0,
        memory_peak_mib: 0,
    };
    let report = Report {
        surface: Surface::default(),
        refusal,
        spent,
    };
    artifact::write(&file, key, b"code", &report).unwrap();
    Artifact::verify(file, key, &SealKey::OF_PIPE).unwrap()
}

/// Changes one byte, at a place counted from the end if it is negative. A new file: the old one may be mapped.
fn flip(path: &Path, at: isize) {
    let mut bytes = std::fs::read(path).unwrap();
    let at = usize::try_from(at).unwrap_or_else(|_| bytes.len() - at.unsigned_abs());
    bytes[at] ^= 1;
    renew(path, &bytes);
}

fn renew(path: &Path, bytes: &[u8]) {
    std::fs::remove_file(path).unwrap();
    std::fs::write(path, bytes).unwrap();
    set_mode(path, FILE_MODE);
}

#[tokio::test]
async fn cached_artifact_is_found_and_mapped() {
    let scene = Scene::new();
    let cache = scene.open();
    assert!(cache.take(&scene.key, &scene.engine).is_none());
    scene.fill(&cache).await;
    assert_eq!(
        (mode(&scene.path()), mode(&scene.file(&cache))),
        (DIRECTORY_MODE, FILE_MODE)
    );
    let (_, report) = scene
        .open()
        .take(&scene.key, &scene.engine)
        .expect("by the next daemon too");
    assert!(
        report
            .surface
            .exports
            .contains("nodedock:driver/identity@0.2.0")
    );
    assert_eq!(
        std::fs::read_dir(scene.path()).unwrap().count(),
        1,
        "nothing is left beside it"
    );
}

#[tokio::test]
async fn damaged_cache_file_is_replaced() {
    let scene = Scene::new();
    let cache = scene.open();
    let outside = scene.directory.path().join("outside");
    let other_key = Key {
        source: [7; 32],
        ..scene.key
    };
    type Damage<'a> = Box<dyn Fn(&Path) + 'a>;
    let cases: Vec<(&str, Damage<'_>)> = vec![
        ("a bit of the code", Box::new(|path| flip(path, 4096))),
        ("a bit of the report", Box::new(|path| flip(path, -200))),
        (
            "a bit of the seal's lengths",
            Box::new(|path| flip(path, -105)),
        ),
        ("a bit of the settings", Box::new(|path| flip(path, -50))),
        ("a bit of the digest", Box::new(|path| flip(path, -1))),
        (
            "cut",
            Box::new(|path| renew(path, &std::fs::read(path).unwrap()[..9000])),
        ),
        (
            "cut by one byte",
            Box::new(|path| {
                let bytes = std::fs::read(path).unwrap();
                renew(path, &bytes[..bytes.len() - 1]);
            }),
        ),
        (
            "too long",
            Box::new(|path| {
                let mut bytes = std::fs::read(path).unwrap();
                bytes.push(0);
                renew(path, &bytes);
            }),
        ),
        ("empty", Box::new(|path| renew(path, b""))),
        ("zeroes", Box::new(|path| renew(path, &[0; 9000]))),
        (
            "a program",
            Box::new(|path| renew(path, &std::fs::read("/proc/self/exe").unwrap()[..9000])),
        ),
        (
            "of another source",
            Box::new(|path| {
                let file = File::create(path).unwrap();
                empty_artifact(&other_key, None)
                    .seal_to(&file, &other_key, &cache.seal_key)
                    .unwrap();
            }),
        ),
        (
            "a refusal",
            Box::new(|path| {
                let refusal = Some(crate::LoadError::Empty);
                let file = File::create(path).unwrap();
                empty_artifact(&scene.key, refusal)
                    .seal_to(&file, &scene.key, &cache.seal_key)
                    .unwrap();
            }),
        ),
        ("writable by others", Box::new(|path| set_mode(path, 0o620))),
        (
            "of two names",
            Box::new(|path| std::fs::hard_link(path, &outside).unwrap()),
        ),
        (
            "a link",
            Box::new(|path| {
                std::fs::rename(path, &outside).unwrap();
                symlink(&outside, path).unwrap();
            }),
        ),
        (
            "a directory",
            Box::new(|path| {
                std::fs::remove_file(path).unwrap();
                std::fs::create_dir(path).unwrap();
            }),
        ),
        (
            "a pipe",
            Box::new(|path| {
                std::fs::remove_file(path).unwrap();
                let kind = rustix::fs::FileType::Fifo;
                rustix::fs::mknodat(
                    rustix::fs::CWD,
                    path,
                    kind,
                    Mode::from_raw_mode(FILE_MODE),
                    0,
                )
                .unwrap();
            }),
        ),
    ];
    for (what, damage) in cases {
        scene.fill(&cache).await;
        assert!(
            cache.take(&scene.key, &scene.engine).is_some(),
            "before: {what}"
        );
        damage(&scene.file(&cache));
        assert!(cache.take(&scene.key, &scene.engine).is_none(), "{what}");
        assert!(
            scene.file(&cache).symlink_metadata().is_err(),
            "removed: {what}"
        );
        let _ = std::fs::remove_file(&outside);
    }
    scene.fill(&cache).await;
    assert!(cache.take(&scene.key, &scene.engine).is_some());
}

/// The seal was a digest: a process that could write to the directory put another driver's code under the digest of a signed file.
#[tokio::test]
async fn code_sealed_by_others_is_refused() {
    let scene = Scene::new();
    let cache = scene.open();
    let compiled = || async {
        Compiler::InProcess
            .compile(scene.key, scene.source.clone())
            .await
            .unwrap()
    };
    let keys = [SealKey::OF_PIPE, SealKey::random().unwrap()];
    for forged_with in &keys {
        let file = File::options()
            .create_new(true)
            .write(true)
            .mode(FILE_MODE)
            .open(scene.file(&cache))
            .unwrap();
        compiled()
            .await
            .seal_to(&file, &scene.key, forged_with)
            .unwrap();
        assert!(cache.take(&scene.key, &scene.engine).is_none());
        assert!(!scene.file(&cache).exists());
    }
    let file = File::options()
        .create_new(true)
        .write(true)
        .mode(FILE_MODE)
        .open(scene.file(&cache))
        .unwrap();
    compiled()
        .await
        .seal_to(&file, &scene.key, &cache.seal_key)
        .unwrap();
    assert!(
        cache.take(&scene.key, &scene.engine).is_some(),
        "the same file with the key of the cache"
    );
}

#[tokio::test]
async fn missing_key_resets_the_cache() {
    let scene = Scene::new();
    let path = scene.paths().key;
    let outside = scene.directory.path().join("outside");
    type Damage<'a> = Box<dyn Fn() + 'a>;
    let cases: Vec<(&str, Damage<'_>)> = vec![
        ("missing", Box::new(|| std::fs::remove_file(&path).unwrap())),
        ("short", Box::new(|| renew(&path, &[7; 31]))),
        ("long", Box::new(|| renew(&path, &[7; 33]))),
        ("empty", Box::new(|| renew(&path, &[]))),
        ("read by others", Box::new(|| set_mode(&path, 0o640))),
        ("written by others", Box::new(|| set_mode(&path, 0o602))),
        (
            "of two names",
            Box::new(|| std::fs::hard_link(&path, &outside).unwrap()),
        ),
        (
            "a link",
            Box::new(|| {
                std::fs::rename(&path, &outside).unwrap();
                symlink(&outside, &path).unwrap();
            }),
        ),
        (
            "a directory, in whose place no key can be stored",
            Box::new(|| {
                std::fs::remove_file(&path).unwrap();
                std::fs::create_dir(&path).unwrap();
            }),
        ),
    ];
    for (what, damage) in cases {
        scene.fill(&scene.open()).await;
        assert!(
            scene.open().take(&scene.key, &scene.engine).is_some(),
            "before: {what}"
        );
        damage();
        let cache = scene.open();
        assert!(!scene.file(&cache).exists(), "{what}");
        scene.fill(&cache).await;
        assert!(cache.take(&scene.key, &scene.engine).is_some(), "{what}");
        if path.is_file() {
            let found = path.symlink_metadata().unwrap();
            assert_eq!(
                (found.mode() & 0o7777, found.len()),
                (FILE_MODE, 32),
                "{what}"
            );
            assert!(
                scene.open().take(&scene.key, &scene.engine).is_some(),
                "{what}"
            );
        }
        let _ = std::fs::remove_file(&outside);
    }
}

#[tokio::test]
async fn files_of_other_users_are_refused() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can give files away");
        return;
    }
    let scene = Scene::new();
    let cache = scene.open();
    scene.fill(&cache).await;
    chown(scene.file(&cache), Some(65534), None).unwrap();
    assert!(cache.take(&scene.key, &scene.engine).is_none());
    chown(scene.path(), Some(65534), None).unwrap();
    let refused = Cache::open(&scene.paths(), &scene.engine)
        .map(drop)
        .unwrap_err();
    assert!(
        refused.to_string().contains("belongs to user 65534"),
        "{refused}"
    );
    assert!(
        cache.take(&scene.key, &scene.engine).is_none(),
        "also while the daemon runs"
    );
}

#[tokio::test]
async fn open_cache_directory_is_closed() {
    let scene = Scene::new();
    let cache = scene.open();
    scene.fill(&cache).await;
    set_mode(&scene.path(), 0o755);
    assert!(
        scene.open().take(&scene.key, &scene.engine).is_some(),
        "others could read only"
    );
    assert_eq!(mode(&scene.path()), DIRECTORY_MODE);
    for open in [0o777, 0o2770] {
        scene.fill(&cache).await;
        set_mode(&scene.path(), open);
        assert!(cache.take(&scene.key, &scene.engine).is_none(), "{open:o}");
        assert_eq!(mode(&scene.path()), DIRECTORY_MODE);
    }
}

#[test]
fn links_and_files_are_no_cache() {
    let scene = Scene::new();
    let link = scene.directory.path().join("link");
    symlink(scene.directory.path(), &link).unwrap();
    let file = scene.directory.path().join("file");
    std::fs::write(&file, "x").unwrap();
    for directory in [link, file] {
        let paths = CachePaths {
            directory,
            ..scene.paths()
        };
        assert!(Cache::open(&paths, &scene.engine).is_err(), "{paths:?}");
    }
}

#[tokio::test]
async fn removed_cache_directory_is_recreated() {
    let scene = Scene::new();
    let cache = scene.open();
    std::fs::remove_dir_all(scene.path()).unwrap();
    assert!(cache.take(&scene.key, &scene.engine).is_none());
    scene.fill(&cache).await;
    assert!(cache.take(&scene.key, &scene.engine).is_some());
}

#[tokio::test]
async fn only_old_artifacts_are_removed() {
    let scene = Scene::new();
    scene.fill(&scene.open()).await;
    let digits = "0".repeat(64);
    let old = ["-0123456789abcdef.cwasm", "-0123456789abcdef.cwasm.new"];
    let old: Vec<_> = old
        .iter()
        .map(|ending| scene.path().join(format!("{digits}{ending}")))
        .collect();
    let strange = scene.path().join("README");
    for path in old.iter().chain([&strange]) {
        std::fs::write(path, "x").unwrap();
    }
    let cache = scene.open();
    assert!(old.iter().all(|path| !path.exists()) && strange.exists());
    assert!(cache.take(&scene.key, &scene.engine).is_some());
}

#[test]
fn least_recently_used_are_removed_first() {
    let scene = Scene::new();
    let cache = scene.open();
    let keys: Vec<Key> = (0..5)
        .map(|n| Key {
            source: [n; 32],
            ..scene.key
        })
        .collect();
    let begin = SystemTime::now() - Duration::from_secs(3600);
    for (key, n) in keys.iter().zip(0..) {
        cache.put(key, empty_artifact(key, None));
        let file = File::open(scene.path().join(cache.name(key))).unwrap();
        file.set_modified(begin + Duration::from_secs(n)).unwrap();
    }
    let there = || {
        let is_there = |key: &&Key| scene.path().join(cache.name(key)).exists();
        keys.iter()
            .filter(is_there)
            .map(|key| key.source[0])
            .collect::<Vec<_>>()
    };
    let directory = Directory::open(&cache.path).unwrap();
    let bytes = std::fs::metadata(scene.path().join(cache.name(&keys[0])))
        .unwrap()
        .len();
    directory.trim(4, u64::MAX);
    assert_eq!(there(), [1, 2, 3, 4]);
    let used = super::open(
        &scene.path().join(cache.name(&keys[2])),
        &keys[2],
        &cache.seal_key,
    );
    assert!(used.unwrap().is_some(), "it is used now");
    directory.trim(9, 2 * bytes);
    assert_eq!(there(), [2, 4]);
    directory.trim(1, u64::MAX);
    assert_eq!(there(), [2]);
}

#[test]
fn engines_have_the_same_settings() {
    let running = engine::Runtime::new().unwrap();
    for parallel in [false, true] {
        assert_eq!(
            settings(&running.engine),
            settings(&engine::for_compiling(parallel).unwrap())
        );
    }
}

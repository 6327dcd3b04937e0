use super::watched::Directory as _;
use super::*;

struct Watched {
    dir: tempfile::TempDir,
    events: mpsc::Receiver<FileEvent>,
    tasks: Tasks,
}

impl Watched {
    fn new(prepare: impl FnOnce(&Path)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        prepare(dir.path());
        let (sender, events) = mpsc::channel(16);
        let tasks = Tasks::new();
        tasks.spawn(
            "watch",
            watch(
                dir.path().to_owned(),
                watch::Sender::default().subscribe(),
                tasks.clone(),
                sender,
            ),
        );
        Self { dir, events, tasks }
    }

    async fn changed(&mut self) -> DriverFiles {
        match self.next().await {
            FileEvent::Changed(files) => files,
            other => panic!("{other:?}"),
        }
    }

    async fn next(&mut self) -> FileEvent {
        match self.events.recv().await.unwrap() {
            FileEvent::Listed => self.events.recv().await.unwrap(),
            other => other,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

#[tokio::test]
async fn existing_and_later_files_are_reported() {
    let mut watched = Watched::new(|dir| std::fs::write(dir.join("a.wasm"), "a").unwrap());
    assert_eq!(watched.changed().await.stem, "a");
    std::fs::write(watched.path("b.wasm"), "b").unwrap();
    assert_eq!(watched.changed().await.stem, "b");
    std::fs::remove_file(watched.path("a.wasm")).unwrap();
    assert_eq!(watched.next().await, FileEvent::Gone("a".to_owned()));
    assert!(watched.tasks.drain(Duration::from_secs(5)).await);
}

#[tokio::test]
async fn initial_list_ends_with_one_event() {
    let mut watched = Watched::new(|dir| {
        std::fs::write(dir.join("a.wasm"), "a").unwrap();
        std::fs::write(dir.join("b.wasm"), "b").unwrap();
    });
    watched.changed().await;
    watched.changed().await;
    assert_eq!(watched.events.recv().await, Some(FileEvent::Listed));
    std::fs::remove_file(watched.path("a.wasm")).unwrap();
    assert_eq!(
        watched.events.recv().await,
        Some(FileEvent::Gone("a".to_owned()))
    );
    let mut empty = Watched::new(|_| ());
    assert_eq!(empty.events.recv().await, Some(FileEvent::Listed));
}

#[tokio::test]
async fn only_known_side_files_are_changes() {
    let mut watched = Watched::new(|dir| std::fs::write(dir.join("a.wasm"), "a").unwrap());
    assert_eq!(watched.changed().await.grant, None);
    std::fs::write(watched.path("b.grant.yaml"), "x").unwrap();
    std::fs::write(watched.path("notes.txt"), "x").unwrap();
    std::fs::write(watched.path(".hidden.wasm"), "x").unwrap();
    std::fs::write(watched.path("a.grant.yaml"), "x").unwrap();
    let files = watched.changed().await;
    assert_eq!(
        (files.stem.as_str(), files.grant),
        ("a", Some(watched.path("a.grant.yaml")))
    );
}

#[tokio::test]
async fn unclosed_file_is_not_reported() {
    use std::io::Write;
    let mut watched = Watched::new(|_| ());
    // The watch is there first: of what was there before it, only the age tells whether it is whole.
    tokio::task::yield_now().await;
    let mut half = std::fs::File::create(watched.path("a.wasm")).unwrap();
    half.write_all(b"first ").unwrap();
    std::fs::write(watched.path("b.wasm"), "b").unwrap();
    assert_eq!(watched.changed().await.stem, "b");
    half.write_all(b"second").unwrap();
    drop(half);
    let files = watched.changed().await;
    assert_eq!(std::fs::read(files.wasm.unwrap()).unwrap(), b"first second");
}

#[tokio::test]
async fn late_signature_is_a_driver_change() {
    let mut watched = Watched::new(|dir| std::fs::write(dir.join("a.wasm"), "a").unwrap());
    assert_eq!(watched.changed().await.signature, None);
    std::fs::write(watched.path("b.wasm.sig"), "x").unwrap();
    std::fs::write(watched.path("a.wasm.sig"), "x").unwrap();
    let files = watched.changed().await;
    assert_eq!(
        (files.stem.as_str(), files.signature),
        ("a", Some(watched.path("a.wasm.sig")))
    );
    std::fs::write(watched.path("b.wasm"), "b").unwrap();
    assert_eq!(
        watched.changed().await.signature,
        Some(watched.path("b.wasm.sig"))
    );
}

#[tokio::test]
async fn writable_directory_is_reported_before_files() {
    use std::os::unix::fs::PermissionsExt;
    let mode = |dir: &Path, mode| {
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let mut watched = Watched::new(|dir| {
        std::fs::write(dir.join("a.wasm"), "a").unwrap();
        mode(dir, 0o777);
    });
    let reported = watched.next().await;
    assert!(
        matches!(&reported, FileEvent::Permissions(faults) if faults.len() == 1),
        "{reported:?}"
    );
    assert_eq!(watched.changed().await.stem, "a");
    mode(watched.dir.path(), 0o700);
    assert_eq!(watched.next().await, FileEvent::Permissions(Vec::new()));
}

/// A file that is whole since long.
fn put(dir: &Path, stem: &str) {
    let file = std::fs::File::create(dir.join(format!("{stem}.wasm"))).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
}

/// One link in a circle, or one name that is too long for a grant's, kept every other driver of the directory from being seen.
#[test]
fn unreadable_file_hides_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let long = "l".repeat(248);
    put(dir.path(), "a");
    put(dir.path(), &long);
    std::os::unix::fs::symlink("circle.wasm", dir.path().join("circle.wasm")).unwrap();
    let (listing, unread) = list(dir.path(), &Listing::new()).unwrap();
    assert_eq!(listing.keys().collect::<Vec<_>>(), ["a", &long]);
    assert_eq!(
        unread
            .iter()
            .map(|(stem, _)| stem.as_str())
            .collect::<Vec<_>>(),
        ["circle"]
    );

    std::os::unix::fs::symlink("a.grant.yaml", dir.path().join("a.grant.yaml")).unwrap();
    let (kept, unread) = list(dir.path(), &listing).unwrap();
    assert_eq!(
        (kept.get("a"), unread.len()),
        (listing.get("a"), 2),
        "it stays as it was"
    );
}

/// The files listed first were taken, in the order of the file system: a new file displaced a driver that served.
#[test]
fn excess_files_displace_no_driver() {
    let dir = tempfile::tempdir().unwrap();
    let old: Vec<_> = (0..limit::DRIVER_FILES_MAX)
        .map(|n| format!("m{n:03}"))
        .collect();
    old.iter().for_each(|stem| put(dir.path(), stem));
    let mut state = DriversDirectory {
        path: dir.path().to_owned(),
        ..DriversDirectory::default()
    };
    state.look();
    assert!(state.reported.keys().eq(&old));
    (0..limit::DRIVER_FILES_MAX).for_each(|n| put(dir.path(), &format!("a{n:03}")));
    assert_eq!(state.look(), []);

    std::fs::create_dir(dir.path().join("a.wasm")).unwrap();
    std::fs::remove_file(dir.path().join("m100.wasm")).unwrap();
    let reported = state.look().into_iter().map(|event| match event {
        FileEvent::Changed(files) => format!("+{}", files.stem),
        FileEvent::Gone(stem) => format!("-{stem}"),
        other => format!("{other:?}"),
    });
    assert_eq!(reported.collect::<Vec<_>>(), ["+a000", "-m100"]);
    assert_eq!(
        present(dir.path()).unwrap()[0],
        "a000.wasm",
        "a new daemon takes them by name"
    );
}

fn image(dir: &Path, name: &str) -> DriverImage {
    let directory = dir.join(name);
    DriverImage {
        name: name.to_owned(),
        directory,
        side_files: dir.to_owned(),
    }
}

/// A file that is whole since long, in a directory that is made.
fn put_in(dir: &Path, name: &str) -> PathBuf {
    std::fs::create_dir_all(dir).unwrap();
    let file = std::fs::File::create(dir.join(name)).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    dir.join(name)
}

#[test]
fn image_has_driver_signature_and_settings() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let gpu = image(at, "gpu");
    let wasm = put_in(&gpu.directory, "driver.wasm");
    let signature = put_in(&gpu.directory, "driver.wasm.sig");
    for ignored in [
        "gpu.grant.yaml",
        "driver.grant.yaml",
        "gpu.config.yaml",
        ".hidden.wasm",
        "LICENSE",
    ] {
        put_in(&gpu.directory, ignored);
    }
    let images = vec![gpu, image(at, "none")];
    let path = at.join("drivers");
    let mut state = DriversDirectory {
        path,
        images,
        ..DriversDirectory::default()
    };
    let found = |events: &[FileEvent], stem: &str| {
        let files = events.iter().find_map(|event| match event {
            FileEvent::Changed(files) if files.stem == stem => Some(files.clone()),
            _ => None,
        });
        files.unwrap_or_else(|| panic!("{stem} in {events:?}"))
    };
    let first = state.look();
    let files = found(&first, "gpu");
    assert_eq!((files.wasm, files.signature), (Ok(wasm), Some(signature)));
    assert_eq!(
        (files.grant, files.config),
        (None, None),
        "an image grants itself nothing"
    );
    assert!(
        matches!(found(&first, "none").wasm, Err(ImageError::Unlisted { .. })),
        "{first:?}"
    );
    assert_eq!((first.len(), first.last()), (3, Some(&FileEvent::Listed)));
    assert_eq!(state.look(), []);

    let grant = put_in(at, "gpu.grant.yaml");
    assert_eq!(found(&state.look(), "gpu").grant, Some(grant));
    put_in(&at.join("none"), "README.md");
    assert!(matches!(
        found(&state.look(), "none").wasm,
        Err(ImageError::Empty { .. })
    ));
    ["b.wasm", "a.wasm", "c.wasm"]
        .iter()
        .for_each(|name| drop(put_in(&at.join("none"), name)));
    let several = found(&state.look(), "none").wasm.unwrap_err();
    assert!(
        several.to_string().contains("a.wasm and b.wasm"),
        "{several}"
    );
}

#[test]
fn image_precedes_file_of_same_name() {
    let dir = tempfile::tempdir().unwrap();
    let (path, gpu) = (dir.path().join("drivers"), image(dir.path(), "gpu"));
    let (file, of_image) = (
        put_in(&path, "gpu.wasm"),
        put_in(&gpu.directory, "gpu.wasm"),
    );
    put_in(&path, "nic.wasm");
    let mut state = DriversDirectory {
        path,
        images: vec![gpu],
        ..DriversDirectory::default()
    };
    let first = state.look();
    let [
        FileEvent::Shadowed(shadowed),
        FileEvent::Changed(gpu),
        FileEvent::Changed(nic),
        FileEvent::Listed,
    ] = first.as_slice()
    else {
        panic!("{first:?}")
    };
    assert_eq!(
        (shadowed, &gpu.wasm, nic.stem.as_str()),
        (&vec![file.clone()], &Ok(of_image), "nic")
    );
    std::fs::remove_file(file).unwrap();
    assert_eq!(state.look(), [FileEvent::Shadowed(Vec::new())]);
}

#[test]
fn images_load_without_a_drivers_directory() {
    let dir = tempfile::tempdir().unwrap();
    let (path, gpu) = (put_in(dir.path(), "drivers"), image(dir.path(), "gpu"));
    put_in(&gpu.directory, "gpu.wasm");
    let mut state = DriversDirectory {
        path: path.clone(),
        images: vec![gpu],
        ..DriversDirectory::default()
    };
    let first = state.look();
    assert!(
        matches!(first.as_slice(), [FileEvent::Changed(_)]),
        "{first:?}"
    );
    assert_eq!(state.look(), []);
    std::fs::remove_file(path).unwrap();
    assert_eq!(state.look(), [FileEvent::Listed]);
}

/// The directory of the grants is another than that of the image.
#[tokio::test]
async fn grant_beside_config_is_watched() {
    let dir = tempfile::tempdir().unwrap();
    let (gpu, (sender, mut events)) = (image(dir.path(), "gpu"), mpsc::channel(16));
    put_in(&gpu.directory, "gpu.wasm");
    std::fs::create_dir(dir.path().join("drivers")).unwrap();
    let tasks = Tasks::new();
    tasks.spawn(
        "watch",
        watch(
            dir.path().join("drivers"),
            watch::Sender::new(vec![gpu]).subscribe(),
            tasks.clone(),
            sender,
        ),
    );
    while events.recv().await != Some(FileEvent::Listed) {}
    // Far earlier than the next list on a timer.
    let noticed = tokio::time::timeout(limit::RELIST_PERIOD / 3, async {
        std::fs::write(dir.path().join("gpu.grant.yaml"), "x").unwrap();
        events.recv().await
    });
    let Ok(Some(FileEvent::Changed(files))) = noticed.await else {
        panic!("it was not noticed")
    };
    assert_eq!(files.grant, Some(dir.path().join("gpu.grant.yaml")));
    assert!(tasks.drain(Duration::from_secs(5)).await);
}

/// Another list of images took effect at the next start alone.
#[tokio::test]
async fn images_follow_the_config() {
    let dir = tempfile::tempdir().unwrap();
    let drivers = dir.path().join("drivers");
    let (gpu, nic) = (image(dir.path(), "gpu"), image(dir.path(), "nic"));
    let other = DriverImage {
        directory: dir.path().join("other"),
        ..gpu.clone()
    };
    let file = put_in(&drivers, "gpu.wasm");
    for image in [&gpu, &nic, &other] {
        put_in(&image.directory, "a.wasm");
    }
    let (images, (sender, mut events)) = (watch::Sender::new(Vec::new()), mpsc::channel(16));
    let tasks = Tasks::new();
    let following = watch(drivers, images.subscribe(), tasks.clone(), sender);
    tasks.spawn("watch", following);
    let mut next = async || {
        let event = tokio::time::timeout(limit::RELIST_PERIOD / 3, events.recv()).await;
        match event.expect("it is noticed at once").unwrap() {
            FileEvent::Changed(files) => {
                format!("{}: {}", files.stem, files.wasm.unwrap().display())
            }
            FileEvent::Gone(stem) => format!("{stem} is gone"),
            FileEvent::Shadowed(files) => format!("{} shadowed", files.len()),
            event => format!("{event:?}"),
        }
    };
    let of = |image: &DriverImage| {
        format!(
            "{}: {}",
            image.name,
            image.directory.join("a.wasm").display()
        )
    };
    let of_file = format!("gpu: {}", file.display());
    assert_eq!(
        [next().await, next().await],
        [of_file.clone(), "Listed".to_owned()]
    );
    images.send_replace(vec![gpu.clone(), nic.clone()]);
    let wanted = ["1 shadowed", "gpu is gone", &of(&gpu), &of(&nic)];
    for wanted in wanted {
        assert_eq!(next().await, wanted);
    }
    // The same image in another directory is another version of the driver.
    images.send_replace(vec![other.clone()]);
    assert_eq!(
        [next().await, next().await],
        [of(&other), "nic is gone".to_owned()]
    );
    // Its directory is watched.
    put_in(&other.directory, "a.wasm.sig");
    assert_eq!(next().await, of(&other));
    images.send_replace(Vec::new());
    let wanted = ["0 shadowed", "gpu is gone", &of_file];
    for wanted in wanted {
        assert_eq!(next().await, wanted);
    }
    assert!(tasks.drain(Duration::from_secs(5)).await);
}

#[tokio::test]
async fn rename_and_directory_removal_are_noticed() {
    let mut watched = Watched::new(|dir| std::fs::write(dir.join("x.tmp"), "a").unwrap());
    std::fs::rename(watched.path("x.tmp"), watched.path("a.wasm")).unwrap();
    assert_eq!(watched.changed().await.stem, "a");
    std::fs::remove_dir_all(watched.dir.path()).unwrap();
    assert_eq!(watched.next().await, FileEvent::Gone("a".to_owned()));
}

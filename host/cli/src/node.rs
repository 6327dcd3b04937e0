//! `nodedock node`: what concerns this machine's hardware, without a daemon.

use std::fs::{File, Permissions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};
use flate2::Compression;
use flate2::write::GzEncoder;
use nodedock_hardware::{Recorder, Recording, Skipped, Snapshot, Summary};
use tempfile::NamedTempFile;

use super::CommandError;
use super::output::{print_error, printable};

/// Characters of a path in the line that shows progress.
const PROGRESS_PATH_CHARS: usize = 60;
/// Mode of a snapshot without identifiers, which root records and other users test with; before the umask.
const PUBLIC_MODE: u32 = 0o666;
/// Mode of a snapshot that identifies the machine.
const PRIVATE_MODE: u32 = 0o600;

#[derive(Subcommand)]
pub(super) enum NodeCommand {
    /// Record this machine's /sys, /dev and parts of /proc in a file for --hardware, without serial numbers and addresses
    Snapshot(SnapshotArgs),
}

#[derive(Args)]
pub(super) struct SnapshotArgs {
    /// The file to write: NAME.tar, or NAME.tar.gz or NAME.tgz for gzip
    file: PathBuf,
    /// Keep serial numbers, MAC addresses, UUIDs and other identifiers, in a file that its owner alone can read
    #[arg(long)]
    include_identifiers: bool,
    /// Replace FILE if it exists
    #[arg(long)]
    force: bool,
    /// The machine's root: where it is mounted, such as /host in a debug container
    #[arg(long, value_name = "DIR", default_value = "/")]
    machine_root: PathBuf,
}

pub(super) fn run(command: NodeCommand) -> Result<()> {
    match command {
        NodeCommand::Snapshot(args) => snapshot(&args),
    }
}

fn snapshot(args: &SnapshotArgs) -> Result<()> {
    let file = args.file.as_path();
    let form = Form::of(file)?;
    // Before the recording, which takes seconds, and again when the file is written.
    // no error: the file is written then, which reports it
    ensure!(args.force || file.symlink_metadata().is_err(), exists(file));
    let mut recorder = Recorder::new(&args.machine_root);
    if args.include_identifiers {
        recorder = recorder.with_identifiers();
    }
    let Recording { snapshot, summary } = recorder
        .record(&mut progress())
        .with_context(|| format!("record the machine below {}", args.machine_root.display()))?;
    write(&snapshot, form, args).with_context(|| format!("write {}", file.display()))?;
    print_error(&lines(file, snapshot.len(), &summary).join("\n"));
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Plain,
    Gzip,
}

impl Form {
    fn of(file: &Path) -> Result<Self> {
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("tar") => Ok(Form::Plain),
            Some("gz" | "tgz") => Ok(Form::Gzip),
            _ => Err(CommandError::usage(
                format!("{} does not say what to write", file.display()),
                "name the file NAME.tar, NAME.tar.gz or NAME.tgz",
            )
            .into()),
        }
    }
}

fn exists(file: &Path) -> String {
    format!(
        "{} exists already: choose another name, or replace it with --force",
        file.display()
    )
}

/// Writes the archive beside its place, and reads it back before it is moved there: an interrupted run leaves what was there, and no
/// file is left that a daemon would refuse.
fn write(snapshot: &Snapshot, form: Form, args: &SnapshotArgs) -> Result<()> {
    let parent = nodedock_base::file::directory_of(&args.file);
    let mode = if args.include_identifiers {
        PRIVATE_MODE
    } else {
        PUBLIC_MODE
    };
    let permissions = Permissions::from_mode(mode);
    let beside = tempfile::Builder::new()
        .prefix(".nodedock-snapshot-")
        .permissions(permissions)
        .tempfile_in(parent);
    let beside = beside.with_context(|| format!("make a file in {}", parent.display()))?;
    archive(snapshot, form, beside.as_file())?;
    beside.as_file().sync_all()?;
    let read = Snapshot::open(beside.path()).context("read the archive back")?;
    ensure!(
        read == *snapshot,
        "the archive differs from the recording: record the machine again"
    );
    persist(beside, args)
}

fn archive(snapshot: &Snapshot, form: Form, file: &File) -> io::Result<()> {
    let mut out = BufWriter::new(file);
    match form {
        Form::Plain => snapshot.write_archive(&mut out)?,
        Form::Gzip => {
            let mut gzip = GzEncoder::new(&mut out, Compression::best());
            snapshot.write_archive(&mut gzip)?;
            gzip.finish()?;
        }
    }
    out.flush()
}

fn persist(written: NamedTempFile, args: &SnapshotArgs) -> Result<()> {
    let persisted = if args.force {
        written.persist(&args.file)
    } else {
        written.persist_noclobber(&args.file)
    };
    match persisted {
        Ok(_) => Ok(()),
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => {
            Err(error.error).context(exists(&args.file))
        }
        Err(error) => Err(error.error.into()),
    }
}

/// Shows on a terminal how far the recording is.
fn progress() -> impl FnMut(usize, &str) {
    let is_shown = io::stderr().is_terminal();
    move |entries, path| {
        if is_shown {
            let path: String = printable(path).chars().take(PROGRESS_PATH_CHARS).collect();
            let _ = write!(
                io::stderr().lock(),
                "\r\x1b[K{entries} entries, at {path}\r"
            );
        }
    }
}

fn lines(file: &Path, entries: usize, summary: &Summary) -> Vec<String> {
    let Summary {
        files,
        bytes,
        links,
        nodes,
        ..
    } = summary;
    let mut lines = vec![format!(
        "{}: {entries} entries, of them {files} files with {bytes} bytes, {links} links, {nodes} device nodes",
        file.display()
    )];
    for (reason, (count, first)) in &summary.skipped {
        lines.push(format!(
            "left out, {reason}: {count}, the first is {}",
            printable(first)
        ));
    }
    match summary.redacted {
        Some(redacted) => lines.push(format!(
            "replaced: {} identifiers in {} files; look through the snapshot before you publish it",
            redacted.values, redacted.files
        )),
        None => lines.push("the snapshot identifies this machine: do not publish it".to_owned()),
    }
    if summary
        .redacted
        .is_some_and(|redacted| redacted.dropped > 0)
    {
        lines.push(
            "some entries are missing: two had the same name after the replacement".to_owned(),
        );
    }
    if summary.skipped.contains_key(&Skipped::Denied) {
        lines.push("hint: root can read more files".to_owned());
    }
    lines
}

#[cfg(test)]
mod tests {
    use nodedock_base::error::chain;

    use super::*;

    /// A machine with one file, and a directory beside it.
    fn machine() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let device = directory.path().join("machine/sys/devices/a");
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("serial"), "A50285BI\n").unwrap();
        directory
    }

    fn args(directory: &tempfile::TempDir, file: &str) -> SnapshotArgs {
        let path = |name: &str| directory.path().join(name);
        SnapshotArgs {
            file: path(file),
            include_identifiers: false,
            force: false,
            machine_root: path("machine"),
        }
    }

    #[test]
    fn file_name_decides_archive_format() {
        let directory = machine();
        for (name, start) in [
            ("m.tar", *b"ma"),
            ("m.tar.gz", [0x1f, 0x8b]),
            ("m.tgz", [0x1f, 0x8b]),
        ] {
            let args = args(&directory, name);
            snapshot(&args).unwrap();
            assert!(
                std::fs::read(&args.file).unwrap().starts_with(&start),
                "{name}"
            );
            let read = Snapshot::open(&args.file).unwrap();
            let expected = nodedock_hardware::Entry::File(b"00000001\n".to_vec());
            assert_eq!(read.get("/sys/devices/a/serial"), Some(&expected), "{name}");
        }
        for name in ["m", "m.zip", "m.tar.bz2"] {
            let error = snapshot(&args(&directory, name)).unwrap_err();
            assert!(
                matches!(error.downcast_ref(), Some(CommandError::Usage { .. })),
                "{error}"
            );
        }
    }

    #[test]
    fn existing_file_needs_force_for_replacement() {
        let directory = machine();
        let mut args = args(&directory, "m.tar");
        std::fs::write(&args.file, "theirs").unwrap();
        let refused = |result: Result<()>| chain(result.unwrap_err().as_ref());
        assert!(refused(snapshot(&args)).contains("m.tar exists already"));
        // The file appeared during the recording.
        let snapshot_of = Recorder::new(&args.machine_root)
            .record(&mut |_, _| ())
            .unwrap()
            .snapshot;
        assert!(refused(write(&snapshot_of, Form::Plain, &args)).contains("m.tar exists already"));
        assert_eq!(std::fs::read(&args.file).unwrap(), b"theirs");
        args.force = true;
        snapshot(&args).unwrap();
        assert!(Snapshot::open(&args.file).is_ok());
        assert_eq!(
            std::fs::read_dir(directory.path()).unwrap().count(),
            2,
            "nothing temporary is left"
        );
    }

    /// `sudo nodedock node snapshot` left a file that the user could not read in the next step.
    #[test]
    fn only_snapshots_with_identifiers_are_private() {
        let directory = machine();
        let mode = |file: &Path| file.metadata().unwrap().permissions().mode() & 0o777;
        let any = directory.path().join("any");
        std::fs::write(&any, "").unwrap();
        let replaced = args(&directory, "m.tar");
        snapshot(&replaced).unwrap();
        assert_eq!(mode(&replaced.file), mode(&any));
        let kept = SnapshotArgs {
            include_identifiers: true,
            ..args(&directory, "n.tar")
        };
        snapshot(&kept).unwrap();
        assert_eq!(mode(&kept.file), PRIVATE_MODE);
    }

    #[test]
    fn missing_directories_are_errors() {
        let directory = machine();
        let nowhere = args(&directory, "nowhere/m.tar");
        let error = chain(snapshot(&nowhere).unwrap_err().as_ref());
        assert!(error.contains("nowhere/m.tar: make a file in "), "{error}");
        let mut empty = args(&directory, "m.tar");
        empty.machine_root = directory.path().join("none");
        let error = chain(snapshot(&empty).unwrap_err().as_ref());
        assert!(
            error.contains("none is no snapshot: it has no directory sys"),
            "{error}"
        );
        assert!(!empty.file.exists());
    }

    #[test]
    fn summary_lists_skipped_and_redacted() {
        let mut summary = Summary::default();
        summary
            .skipped
            .insert(Skipped::Denied, (2, "/sys/a\u{1b}".to_owned()));
        summary.redacted = Some(nodedock_hardware::Redacted::default());
        let lines = lines(Path::new("m.tar"), 3, &summary);
        assert_eq!(
            lines[0],
            "m.tar: 3 entries, of them 0 files with 0 bytes, 0 links, 0 device nodes"
        );
        assert_eq!(
            lines[1],
            "left out, not readable by this user: 2, the first is /sys/a\u{fffd}"
        );
        assert!(
            lines[2].starts_with("replaced: 0 identifiers in 0 files"),
            "{lines:?}"
        );
        assert_eq!(lines[3], "hint: root can read more files");
        summary.redacted = None;
        assert!(super::lines(Path::new("m.tar"), 3, &summary)[2].contains("do not publish it"));
    }
}

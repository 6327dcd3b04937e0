//! `nodedock driver package`: writes a driver as an OCI image layout, which other tools push to a registry.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use oci_spec::image::OciLayout;
use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::image_layout::{self, Description, ImageFile, Layout};
use super::inspect::labelled;
use super::{load, read, read_text};
use nodedock_command::output::{join, print_text};
use nodedock_model::grant::Grant;
use nodedock_model::limit;
use nodedock_wasm::{driver_config, file_watch, trust};

/// Entries of a layout that this command wrote; it has no others.
const LAYOUT_ENTRIES: [&str; 3] = ["blobs", "index.json", "oci-layout"];

#[derive(Args)]
pub struct PackageArgs {
    /// The driver, NAME.wasm
    file: PathBuf,
    /// Grant to put beside the driver, for an operator to read; a daemon reads no grant in an image
    #[arg(long, value_name = "FILE")]
    grant: Option<PathBuf>,
    /// Config to put beside the driver, as an example; a daemon reads no config in an image
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Signature of the driver, which the daemon's `trust` section requires
    #[arg(long, value_name = "FILE")]
    signature: Option<PathBuf>,
    /// Directory for the layout: a new one, an empty one, or a layout, which is replaced
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
}

pub(super) async fn run(args: PackageArgs) -> Result<()> {
    let target = Target::of(&args.output)?;
    let (files, description) = contents(&args).await?;
    let names: Vec<_> = files.iter().map(|file| file.name.clone()).collect();
    let layout = image_layout::layout(files, &description)?;
    target.write(&layout)?;
    print_text(&join(lines(&args, &layout, &description, names)))
}

/// Reads and checks everything that becomes part of the image.
async fn contents(args: &PackageArgs) -> Result<(Vec<ImageFile>, Description)> {
    let file = args.file.as_path();
    let shown = file.display();
    let Some(stem) = file.file_name().and_then(file_watch::stem) else {
        bail!("{shown} is not named NAME.wasm, by which a daemon finds the driver");
    };
    let bytes = read(file, limit::DRIVER_FILE_BYTES_MAX)?;
    let mut files = vec![image_file(stem, ".wasm", bytes.clone())];
    let mut grant = Grant::empty();
    if let Some(path) = &args.grant {
        let text = read_text(path)?;
        grant = Grant::parse(&text).with_context(|| format!("grant {}", path.display()))?;
        files.push(image_file(stem, ".grant.yaml", text.into_bytes()));
    }
    if let Some(path) = &args.config {
        let text = read_text(path)?;
        driver_config(&text).with_context(|| format!("config {}", path.display()))?;
        files.push(image_file(stem, ".config.yaml", text.into_bytes()));
    }
    if let Some(path) = &args.signature {
        let bytes = read(path, limit::SIGNATURE_FILE_BYTES_MAX)?;
        trust::check_signature(&bytes).with_context(|| format!("signature {}", path.display()))?;
        files.push(image_file(stem, ".wasm.sig", bytes));
    }
    let found = load(file, bytes, &grant).await?;
    let driver = found
        .driver
        .with_context(|| format!("{shown} cannot be loaded"))?;
    if let Some(path) = &args.grant {
        let missing = driver.missing_grants().join("; ");
        ensure!(
            missing.is_empty(),
            "grant {} lacks what {shown} requests: {missing}",
            path.display()
        );
    }
    let info = driver.info();
    let (name, version, summary) = (
        info.name.to_string(),
        info.version.clone(),
        info.summary.clone(),
    );
    Ok((
        files,
        Description {
            name,
            version,
            summary,
        },
    ))
}

fn image_file(stem: &str, suffix: &str, bytes: Vec<u8>) -> ImageFile {
    ImageFile {
        name: format!("{stem}{suffix}"),
        bytes,
    }
}

fn lines(
    args: &PackageArgs,
    layout: &Layout,
    description: &Description,
    names: Vec<String>,
) -> Vec<String> {
    let (output, Layout { digest, tag, .. }) = (args.output.display(), layout);
    let repository = format!("REGISTRY/{}", description.name);
    let push = [
        format!("skopeo copy --all --preserve-digests oci:{output} docker://{repository}:{tag}"),
        format!("oras cp --from-oci-layout {output}:{tag} {repository}:{tag}"),
    ];
    [
        labelled(
            "driver",
            [format!("{} {}", description.name, description.version)],
        ),
        labelled("files", [names.join(", ")]),
        labelled("layout", [output.to_string()]),
        labelled("digest", [digest.clone()]),
        labelled("push with", push),
        labelled("image", [format!("{repository}@{digest}")]),
    ]
    .concat()
}

/// Directory that the layout is written to.
struct Target {
    path: PathBuf,
    /// There is a layout, which is replaced.
    is_layout: bool,
}

impl Target {
    fn of(output: &Path) -> Result<Self> {
        let shown = output.display();
        let entries = match std::fs::read_dir(output) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(Self {
                    path: output.to_owned(),
                    is_layout: false,
                });
            }
            Err(error) => {
                return Err(error).with_context(|| format!("output {shown} is not a directory"));
            }
        };
        // Through a link, so that not the link is replaced.
        let path = output
            .canonicalize()
            .with_context(|| format!("output {shown}"))?;
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let names = names.collect::<std::io::Result<BTreeSet<_>>>();
        let names = names.with_context(|| format!("list output {shown}"))?;
        if names.is_empty() {
            return Ok(Self {
                path,
                is_layout: false,
            });
        }
        if let Some(other) = names
            .iter()
            .find(|name| !LAYOUT_ENTRIES.contains(&name.as_str()))
        {
            bail!(
                "output {shown} has {other}, which is no part of an OCI image layout: choose an empty directory"
            );
        }
        let marker = OciLayout::from_file(path.join("oci-layout"));
        marker
            .with_context(|| format!("output {shown} is not empty, and is no OCI image layout"))?;
        Ok(Self {
            path,
            is_layout: true,
        })
    }

    /// Writes the layout beside its place first: an interrupted run leaves what was there.
    fn write(&self, layout: &Layout) -> Result<()> {
        let shown = self.path.display();
        let parent = nodedock_base::file::directory_of(&self.path);
        let beside = tempfile::Builder::new()
            .prefix(".nodedock-package-")
            .tempdir_in(parent);
        let beside = beside.with_context(|| format!("make a directory in {}", parent.display()))?;
        let new = beside.path().join("layout");
        write_files(&new, layout)
            .with_context(|| format!("write the layout in {}", parent.display()))?;
        let moved = if self.is_layout {
            // The former layout is removed with the temporary directory.
            renameat_with(CWD, &new, CWD, &self.path, RenameFlags::EXCHANGE).map_err(Into::into)
        } else {
            std::fs::rename(&new, &self.path)
        };
        moved.with_context(|| format!("move the layout to {shown}"))
    }
}

fn write_files(directory: &Path, layout: &Layout) -> std::io::Result<()> {
    std::fs::create_dir(directory)?;
    std::fs::create_dir_all(directory.join("blobs/sha256"))?;
    layout
        .files
        .iter()
        .try_for_each(|(path, bytes)| std::fs::write(directory.join(path), bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_base::error::chain;

    fn layout(content: &str) -> Layout {
        let file = ImageFile {
            name: "a.wasm".to_owned(),
            bytes: content.into(),
        };
        let [name, version, summary] = ["a.example.com", "1.0.0", ""].map(str::to_owned);
        image_layout::layout(
            vec![file],
            &Description {
                name,
                version,
                summary,
            },
        )
        .unwrap()
    }

    fn read_all(directory: &Path, layout: &Layout) {
        for (path, bytes) in &layout.files {
            assert_eq!(
                &std::fs::read(directory.join(path)).unwrap(),
                bytes,
                "{path}"
            );
        }
        let blobs = std::fs::read_dir(directory.join("blobs/sha256"))
            .unwrap()
            .count();
        assert_eq!(
            blobs + 2,
            layout.files.len(),
            "no blob of another layout is left"
        );
    }

    #[test]
    fn layout_replaces_only_empty_or_layout() {
        let directory = tempfile::tempdir().unwrap();
        let (new, empty) = (directory.path().join("new"), directory.path().join("empty"));
        std::fs::create_dir(&empty).unwrap();
        std::os::unix::fs::symlink("empty", directory.path().join("link")).unwrap();
        let link = directory.path().join("link");
        for (place, content) in [(&new, "1"), (&new, "2"), (&empty, "3"), (&link, "4")] {
            let layout = layout(content);
            Target::of(place).unwrap().write(&layout).unwrap();
            read_all(place, &layout);
        }
        assert!(link.is_symlink());
        let names = std::fs::read_dir(directory.path()).unwrap().count();
        assert_eq!(names, 3, "nothing temporary is left");
    }

    #[test]
    fn directory_without_layout_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let refused = |path: &Path| chain(Target::of(path).err().expect("it is refused").as_ref());
        std::fs::write(path.join("index.json"), "{}").unwrap();
        assert!(
            refused(path).contains("is not empty, and is no OCI image layout"),
            "{}",
            refused(path)
        );
        std::fs::write(path.join("oci-layout"), "{}").unwrap();
        assert!(
            refused(path).contains("is no OCI image layout"),
            "{}",
            refused(path)
        );
        std::fs::write(
            path.join("oci-layout"),
            r#"{"imageLayoutVersion": "1.0.0"}"#,
        )
        .unwrap();
        assert!(Target::of(path).unwrap().is_layout);
        std::fs::write(path.join("notes.txt"), "").unwrap();
        assert!(refused(path).contains("has notes.txt"), "{}", refused(path));
        let file = path.join("notes.txt");
        assert!(
            refused(&file).contains("is not a directory"),
            "{}",
            refused(&file)
        );
        let nowhere = Target::of(&path.join("a/b")).unwrap();
        assert!(
            chain(nowhere.write(&layout("1")).unwrap_err().as_ref())
                .contains("make a directory in")
        );
    }
}

//! An OCI image layout with a driver, as bytes: the same files have the same digests.
//!
//! The image is an index with a manifest for each platform, all with one layer. A driver runs on every platform, and an image has no way to say
//! so: container runtimes unpack an image only if its config names the node's platform. Pure; `package` reads and writes the files.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;

use anyhow::{Context, Result};
use flate2::{Compression, GzBuilder};
use oci_spec::image::{
    ANNOTATION_DESCRIPTION, ANNOTATION_REF_NAME, ANNOTATION_TITLE, ANNOTATION_VERSION, Arch,
    Descriptor, ImageConfigurationBuilder, ImageIndexBuilder, ImageManifestBuilder, MediaType,
    OciLayoutBuilder, Os, PlatformBuilder, RootFsBuilder, SCHEMA_VERSION, Sha256Digest,
};
use serde::Serialize;
use sha2::{Digest, Sha256};

/// The platforms for which wasmtime compiles drivers.
const PLATFORMS: [Arch; 4] = [Arch::Amd64, Arch::ARM64, Arch::RISCV64, Arch::s390x];
/// Mode of the files in the image: the daemon refuses files that others may write.
const FILE_MODE: u32 = 0o644;
/// Value in a gzip header for no operating system in particular, so that all machines write the same.
const GZIP_OS_UNKNOWN: u8 = 255;
/// Version of the layout, as the image specification has it.
const LAYOUT_VERSION: &str = "1.0.0";
/// Characters of a tag (distribution specification).
const TAG_LENGTH_MAX: usize = 128;

/// A file of the image.
#[derive(Debug, Clone)]
pub(super) struct ImageFile {
    pub(super) name: String,
    pub(super) bytes: Vec<u8>,
}

/// The driver, as annotations of the image show it.
#[derive(Debug, Clone)]
pub(super) struct Description {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) summary: String,
}

#[derive(Debug)]
pub(super) struct Layout {
    /// Digest of the image's index: `sha256:` and hex.
    pub(super) digest: String,
    /// The name of the image in the layout.
    pub(super) tag: String,
    /// Contents of files by path in the layout.
    pub(super) files: BTreeMap<String, Vec<u8>>,
}

/// Makes the layout of an image with these files.
pub(super) fn layout(mut files: Vec<ImageFile>, description: &Description) -> Result<Layout> {
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let tar = archive(&files).context("write the layer of the image")?;
    let diff_id = format!("sha256:{}", hex(&tar));
    let mut blobs = Blobs::default();
    let layer = blobs.add(
        MediaType::ImageLayerGzip,
        compress(&tar).context("compress the layer")?,
    )?;
    let mut manifests = Vec::new();
    for architecture in PLATFORMS {
        manifests.push(blobs.manifest(architecture, &diff_id, &layer)?);
    }
    let index = ImageIndexBuilder::default()
        .schema_version(SCHEMA_VERSION)
        .media_type(MediaType::ImageIndex)
        .manifests(manifests)
        .annotations(annotations(description))
        .build()?;
    let mut image = blobs.add(MediaType::ImageIndex, json(&index)?)?;
    let (digest, tag) = (image.digest().to_string(), tag(&description.version));
    image.set_annotations(Some(HashMap::from([(
        ANNOTATION_REF_NAME.to_owned(),
        tag.clone(),
    )])));
    let root = ImageIndexBuilder::default()
        .schema_version(SCHEMA_VERSION)
        .media_type(MediaType::ImageIndex)
        .manifests(vec![image])
        .build()?;
    let mut files = blobs.0;
    files.insert("index.json".to_owned(), json(&root)?);
    let marker = OciLayoutBuilder::default()
        .image_layout_version(LAYOUT_VERSION)
        .build()?;
    files.insert("oci-layout".to_owned(), json(&marker)?);
    Ok(Layout { digest, tag, files })
}

fn annotations(description: &Description) -> HashMap<String, String> {
    let Description {
        name,
        version,
        summary,
    } = description;
    let all = [
        (ANNOTATION_TITLE, name),
        (ANNOTATION_VERSION, version),
        (ANNOTATION_DESCRIPTION, summary),
    ];
    let given = all.into_iter().filter(|(_, text)| !text.is_empty());
    given
        .map(|(key, text)| (key.to_owned(), text.clone()))
        .collect()
}

/// A version as a tag, which has no `+`.
fn tag(version: &str) -> String {
    version
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || "._-".contains(c) {
                c
            } else {
                '_'
            }
        })
        .take(TAG_LENGTH_MAX)
        .collect()
}

/// Blobs by path in the layout.
#[derive(Default)]
struct Blobs(BTreeMap<String, Vec<u8>>);

impl Blobs {
    fn add(&mut self, media_type: MediaType, bytes: Vec<u8>) -> Result<Descriptor> {
        let hex = hex(&bytes);
        let digest: Sha256Digest = hex.parse().context("make a digest")?;
        let descriptor = Descriptor::new(media_type, bytes.len() as u64, digest);
        self.0.insert(format!("blobs/sha256/{hex}"), bytes);
        Ok(descriptor)
    }

    /// Adds the config and the manifest of one platform.
    fn manifest(
        &mut self,
        architecture: Arch,
        diff_id: &str,
        layer: &Descriptor,
    ) -> Result<Descriptor> {
        let config = ImageConfigurationBuilder::default()
            .architecture(architecture.clone())
            .os(Os::Linux)
            .rootfs(
                RootFsBuilder::default()
                    .diff_ids(vec![diff_id.to_owned()])
                    .build()?,
            )
            .build()?;
        let manifest = ImageManifestBuilder::default()
            .schema_version(SCHEMA_VERSION)
            .media_type(MediaType::ImageManifest)
            .config(self.add(MediaType::ImageConfig, json(&config)?)?)
            .layers(vec![layer.clone()])
            .build()?;
        let mut descriptor = self.add(MediaType::ImageManifest, json(&manifest)?)?;
        let platform = PlatformBuilder::default()
            .architecture(architecture)
            .os(Os::Linux)
            .build()?;
        descriptor.set_platform(Some(platform));
        Ok(descriptor)
    }
}

fn hex(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Writes JSON with sorted keys: annotations are hash maps.
fn json(value: &impl Serialize) -> Result<Vec<u8>> {
    let mut value = serde_json::to_value(value).context("write JSON")?;
    value.sort_all_objects();
    serde_json::to_vec(&value).context("write JSON")
}

/// A tar archive of the files alone; what of a file is not its content is the same on every machine.
fn archive(files: &[ImageFile]) -> std::io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    for file in files {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Regular);
        header.set_size(file.bytes.len() as u64);
        header.set_mode(FILE_MODE);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        archive.append_data(&mut header, &file.name, file.bytes.as_slice())?;
    }
    archive.into_inner()
}

fn compress(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let builder = GzBuilder::new().mtime(0).operating_system(GZIP_OS_UNKNOWN);
    let mut encoder = builder.write(Vec::new(), Compression::default());
    encoder.write_all(bytes)?;
    encoder.finish()
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use oci_spec::image::{ImageConfiguration, ImageIndex, ImageManifest};

    use super::*;

    fn description() -> Description {
        let [name, version, summary] =
            ["gpu.example.com", "1.2.3+build.5", "GPUs"].map(str::to_owned);
        Description {
            name,
            version,
            summary,
        }
    }

    fn files() -> Vec<ImageFile> {
        let file = |name: &str, bytes: &[u8]| ImageFile {
            name: name.to_owned(),
            bytes: bytes.to_owned(),
        };
        vec![
            file("gpu.wasm.sig", b"signature"),
            file("gpu.wasm", b"\0asm"),
        ]
    }

    fn blob<'a>(layout: &'a Layout, descriptor: &Descriptor) -> &'a [u8] {
        let bytes = &layout.files[&format!(
            "blobs/{}",
            descriptor.digest().to_string().replace(':', "/")
        )];
        assert_eq!(bytes.len() as u64, descriptor.size());
        assert_eq!(
            format!("sha256:{}", hex(bytes)),
            descriptor.digest().to_string()
        );
        bytes
    }

    /// The layout as a client of it reads it: from the index down to the files.
    #[test]
    fn layout_has_files_for_every_platform() {
        let layout = layout(files(), &description()).unwrap();
        let marker: serde_json::Value =
            serde_json::from_slice(&layout.files["oci-layout"]).unwrap();
        assert_eq!(marker, serde_json::json!({"imageLayoutVersion": "1.0.0"}));
        let root = ImageIndex::from_reader(layout.files["index.json"].as_slice()).unwrap();
        let [image] = root.manifests().as_slice() else {
            panic!("{root:?}")
        };
        assert_eq!(image.digest().to_string(), layout.digest);
        assert_eq!(
            image.annotations().as_ref().unwrap()[ANNOTATION_REF_NAME],
            "1.2.3_build.5"
        );
        let index = ImageIndex::from_reader(blob(&layout, image)).unwrap();
        let shown = index.annotations().as_ref().unwrap();
        assert_eq!(
            (shown[ANNOTATION_TITLE].as_str(), shown.len()),
            ("gpu.example.com", 3)
        );
        let mut architectures = Vec::new();
        for descriptor in index.manifests() {
            let manifest = ImageManifest::from_reader(blob(&layout, descriptor)).unwrap();
            let config = ImageConfiguration::from_reader(blob(&layout, manifest.config())).unwrap();
            let platform = descriptor.platform().as_ref().unwrap();
            assert_eq!(
                (platform.architecture(), platform.os()),
                (config.architecture(), config.os())
            );
            architectures.push(config.architecture().to_string());
            let [layer] = manifest.layers().as_slice() else {
                panic!("{manifest:?}")
            };
            let mut tar = Vec::new();
            flate2::read::GzDecoder::new(blob(&layout, layer))
                .read_to_end(&mut tar)
                .unwrap();
            assert_eq!(
                config.rootfs().diff_ids(),
                &[format!("sha256:{}", hex(&tar))]
            );
            let mut archive = tar::Archive::new(tar.as_slice());
            let entries = archive.entries().unwrap().map(|entry| {
                let mut entry = entry.unwrap();
                let mut text = String::new();
                entry.read_to_string(&mut text).unwrap();
                let header = entry.header();
                assert_eq!(
                    (
                        header.uid().unwrap(),
                        header.gid().unwrap(),
                        header.mtime().unwrap()
                    ),
                    (0, 0, 0)
                );
                assert_eq!(header.mode().unwrap(), 0o644);
                (entry.path().unwrap().display().to_string(), text)
            });
            let expected = [("gpu.wasm", "\0asm"), ("gpu.wasm.sig", "signature")];
            let expected = expected.map(|(name, text)| (name.to_owned(), text.to_owned()));
            assert_eq!(entries.collect::<Vec<_>>(), expected);
        }
        assert_eq!(architectures, ["amd64", "arm64", "riscv64", "s390x"]);
        assert_eq!(
            layout.files.len(),
            2 + 1 + 1 + 4 + 4,
            "nothing else is in it"
        );
    }

    /// Annotations are hash maps, whose order differs from one to the next.
    #[test]
    fn digest_depends_on_content_only() {
        let first = layout(files(), &description()).unwrap();
        for _ in 0..16 {
            let mut reversed = files();
            reversed.reverse();
            assert_eq!(layout(reversed, &description()).unwrap().files, first.files);
        }
        let mut other = files();
        other[1].bytes.push(0);
        assert_ne!(layout(other, &description()).unwrap().digest, first.digest);
        let renamed = Description {
            name: "nic.example.com".to_owned(),
            ..description()
        };
        assert_ne!(layout(files(), &renamed).unwrap().digest, first.digest);
    }

    #[test]
    fn a_long_name_is_kept_whole() {
        let name = format!("{}.wasm", "g".repeat(180));
        let tar = archive(&[ImageFile {
            name: name.clone(),
            bytes: Vec::new(),
        }])
        .unwrap();
        let mut archive = tar::Archive::new(tar.as_slice());
        let entry = archive.entries().unwrap().next().unwrap().unwrap();
        assert_eq!(entry.path().unwrap().display().to_string(), name);
    }
}

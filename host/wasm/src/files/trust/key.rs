//! Public keys: the supported kinds, and the verification of signatures.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use ed25519_dalek::pkcs8::{Document, ObjectIdentifier, spki::SubjectPublicKeyInfoRef};
use p256::ecdsa::signature::hazmat::PrehashVerifier;
use sha2::{Digest, Sha256, Sha512};

use super::open::{self, OpenError};

/// A public key as PEM has 200 bytes; with words before it a page.
const KEY_FILE_BYTES_MAX: u64 = 16 << 10;

const EC: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.2.1");
const P256: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.3.1.7");
const ED25519: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.101.112");
const RSA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1");
/// The label of a PEM block with a `SubjectPublicKeyInfo`.
const PUBLIC_KEY: &str = "PUBLIC KEY";

/// Why a key is refused.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("the key's file {} cannot be read", path.display())]
    Read { path: PathBuf, source: OpenError },
    #[error("the key's file {} is not text", path.display())]
    NotText { path: PathBuf },
    #[error("no PEM block `-----BEGIN PUBLIC KEY-----` that can be read ({0})")]
    Pem(String),
    #[error(
        "a {0:?} and not a public key: `openssl pkey -in KEY -pubout` and `cosign public-key` print the public one"
    )]
    Label(String),
    #[error("no public key as PEM blocks hold it (SubjectPublicKeyInfo): {0}")]
    Malformed(String),
    #[error("an {0} key, and ECDSA P-256 and Ed25519 are taken")]
    Kind(String),
    #[error("a weak Ed25519 key, with which a signature may fit any file")]
    Weak,
}

/// The SHA-256 of a key's DER encoding.
pub(super) type KeyId = [u8; 32];

/// A public key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PublicKey {
    pub(super) id: KeyId,
    material: Material,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Material {
    P256(p256::ecdsa::VerifyingKey),
    Ed25519(ed25519_dalek::VerifyingKey),
}

impl PublicKey {
    pub(super) fn read(path: &Path) -> Result<Self, KeyError> {
        let opened = open::open(path, KEY_FILE_BYTES_MAX);
        let opened = opened.map_err(|source| KeyError::Read {
            path: path.to_owned(),
            source,
        })?;
        let text = String::from_utf8(opened.bytes);
        Self::parse(&text.map_err(|_| KeyError::NotText {
            path: path.to_owned(),
        })?)
    }

    /// Parses a PEM block; blanks around it are ignored.
    pub(super) fn parse(pem: &str) -> Result<Self, KeyError> {
        let (label, document) =
            Document::from_pem(pem.trim()).map_err(|error| KeyError::Pem(error.to_string()))?;
        if label != PUBLIC_KEY {
            return Err(KeyError::Label(label.to_owned()));
        }
        let info: SubjectPublicKeyInfoRef<'_> = document.decode_msg().map_err(malformed)?;
        let material = match info.algorithm.oid {
            EC if info
                .algorithm
                .parameters_oid()
                .is_ok_and(|curve| curve == P256) =>
            {
                Material::P256(info.try_into().map_err(malformed)?)
            }
            ED25519 => Material::Ed25519(info.try_into().map_err(malformed)?),
            _ => return Err(KeyError::Kind(kind_of(&info))),
        };
        match material {
            Material::Ed25519(key) if key.is_weak() => Err(KeyError::Weak),
            material => Ok(Self {
                id: Sha256::digest(document.as_bytes()).into(),
                material,
            }),
        }
    }

    /// Returns true if this key made the signature over this content, whose SHA-256 is computed once for all keys. For Ed25519 both ways in
    /// which cosign signs are accepted: over the content itself, and over its SHA-512 (Ed25519ph); a signature of one kind is never valid
    /// as the other.
    pub(super) fn signed(&self, content: &[u8], sha256: &[u8; 32], signature: &[u8]) -> bool {
        match &self.material {
            Material::P256(key) => p256::ecdsa::Signature::from_der(signature)
                .is_ok_and(|signature| key.verify_prehash(sha256, &signature).is_ok()),
            Material::Ed25519(key) => {
                let Ok(signature) = ed25519_dalek::Signature::from_slice(signature) else {
                    return false;
                };
                if key.verify_strict(content, &signature).is_ok() {
                    return true;
                }
                let hash = Sha512::new_with_prefix(content);
                key.verify_prehashed_strict(hash, None, &signature).is_ok()
            }
        }
    }
}

fn malformed(error: impl Display) -> KeyError {
    KeyError::Malformed(error.to_string())
}

/// The kind of a refused key, for the operator.
fn kind_of(info: &SubjectPublicKeyInfoRef<'_>) -> String {
    match info.algorithm.oid {
        RSA => "RSA".to_owned(),
        EC => match info.algorithm.parameters_oid() {
            Ok(curve) => format!("elliptic curve (curve {curve})"),
            Err(_) => "elliptic curve (curve of its own)".to_owned(),
        },
        other => format!("unknown (algorithm {other})"),
    }
}

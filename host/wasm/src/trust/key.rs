//! Public keys: the supported kinds, and the verification of signatures.

use std::fmt;
use std::path::{Path, PathBuf};

use ed25519_dalek::pkcs8::{Document, ObjectIdentifier, spki::SubjectPublicKeyInfoRef};
use p256::ecdsa::signature::hazmat::PrehashVerifier;
use sha2::{Digest, Sha256, Sha512};

use super::open::{self, OpenError};
use nodedock_model::limit;

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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyId([u8; 32]);

/// A public key.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct PublicKey {
    id: KeyId,
    material: Material,
}

#[derive(Clone, PartialEq, Eq)]
enum Material {
    P256(Box<p256::ecdsa::VerifyingKey>),
    Ed25519(Box<ed25519_dalek::VerifyingKey>),
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({}, {})", self.kind(), hex::encode(self.id.0))
    }
}

/// A file's content, hashed once for all keys.
pub(super) struct Content<'a> {
    bytes: &'a [u8],
    sha256: [u8; 32],
}

impl<'a> Content<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, sha256: Sha256::digest(bytes).into() }
    }

    /// `sha256:` and hex.
    pub(super) fn digest(&self) -> String {
        format!("sha256:{}", hex::encode(self.sha256))
    }
}

impl PublicKey {
    pub(super) fn read(path: &Path) -> Result<Self, KeyError> {
        let opened = open::open(path, limit::KEY_FILE_BYTES_MAX);
        let opened = opened.map_err(|source| KeyError::Read { path: path.to_owned(), source })?;
        let text = String::from_utf8(opened.bytes);
        Self::parse(&text.map_err(|_| KeyError::NotText { path: path.to_owned() })?)
    }

    /// Parses a PEM block; blanks around it are ignored.
    pub(super) fn parse(pem: &str) -> Result<Self, KeyError> {
        let (label, document) =
            Document::from_pem(pem.trim()).map_err(|error| KeyError::Pem(error.to_string()))?;
        if label != PUBLIC_KEY {
            return Err(KeyError::Label(label.to_owned()));
        }
        let malformed = |error: &dyn fmt::Display| KeyError::Malformed(error.to_string());
        let info: SubjectPublicKeyInfoRef<'_> = document.decode_msg().map_err(|e| malformed(&e))?;
        let material = match info.algorithm.oid {
            EC => Self::p256(info).map_err(|e| malformed(&e))?,
            ED25519 => {
                let key = ed25519_dalek::VerifyingKey::try_from(info).map_err(|e| malformed(&e))?;
                if key.is_weak() {
                    return Err(KeyError::Weak);
                }
                Some(Material::Ed25519(Box::new(key)))
            }
            _ => None,
        };
        let info: SubjectPublicKeyInfoRef<'_> = document.decode_msg().map_err(|e| malformed(&e))?;
        let material = material.ok_or_else(|| KeyError::Kind(kind_of(&info)))?;
        Ok(Self { id: KeyId(Sha256::digest(document.as_bytes()).into()), material })
    }

    /// None: another curve.
    fn p256(
        info: SubjectPublicKeyInfoRef<'_>,
    ) -> Result<Option<Material>, ed25519_dalek::pkcs8::spki::Error> {
        match info.algorithm.parameters_oid() {
            Ok(P256) => Ok(Some(Material::P256(Box::new(p256::ecdsa::VerifyingKey::try_from(info)?)))),
            _ => Ok(None),
        }
    }

    pub(super) fn id(&self) -> KeyId {
        self.id
    }

    pub(super) fn kind(&self) -> &'static str {
        match self.material {
            Material::P256(_) => "ECDSA P-256",
            Material::Ed25519(_) => "Ed25519",
        }
    }

    /// Whether this key made the signature over this content. For Ed25519 both ways in which cosign signs are accepted: over the content itself,
    /// and over its SHA-512 (Ed25519ph); a signature of one kind is never valid as the other.
    pub(super) fn signed(&self, content: &Content<'_>, signature: &[u8]) -> bool {
        match &self.material {
            Material::P256(key) => p256::ecdsa::Signature::from_der(signature)
                .is_ok_and(|signature| key.verify_prehash(&content.sha256, &signature).is_ok()),
            Material::Ed25519(key) => {
                let Ok(signature) = ed25519_dalek::Signature::from_slice(signature) else { return false };
                let prehashed = || {
                    let hash = Sha512::new_with_prefix(content.bytes);
                    key.verify_prehashed_strict(hash, None, &signature).is_ok()
                };
                key.verify_strict(content.bytes, &signature).is_ok() || prehashed()
            }
        }
    }
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

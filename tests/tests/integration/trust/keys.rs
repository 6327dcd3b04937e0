//! Keys of the tests, and the config that names them.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nodedock_tests::Daemon;
use p256::ecdsa::signature::Signer as _;
use p256::pkcs8::{EncodePublicKey, LineEnding};
use sha2::{Digest, Sha512};

/// A key by its algorithm and its seed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Signer {
    P256(u8),
    Ed25519(u8),
    /// The same key as it is used where a log takes hashes only.
    Ed25519Prehashed(u8),
}

impl Signer {
    /// Returns the signature in the format of `cosign sign-blob`.
    pub(super) fn sign(self, bytes: &[u8]) -> String {
        let signature = match self {
            Self::P256(seed) => {
                let signature: p256::ecdsa::Signature = ec(seed).sign(bytes);
                signature.to_der().as_bytes().to_vec()
            }
            Self::Ed25519(seed) => ed(seed).sign(bytes).to_bytes().to_vec(),
            Self::Ed25519Prehashed(seed) => {
                let signature = ed(seed).sign_prehashed(Sha512::new_with_prefix(bytes), None);
                signature.unwrap().to_bytes().to_vec()
            }
        };
        format!("{}\n", STANDARD.encode(signature))
    }

    pub(super) fn pem(self) -> String {
        let pem = match self {
            Self::P256(seed) => ec(seed).verifying_key().to_public_key_pem(LineEnding::LF),
            Self::Ed25519(seed) | Self::Ed25519Prehashed(seed) => {
                ed(seed).verifying_key().to_public_key_pem(LineEnding::LF)
            }
        };
        pem.unwrap()
    }
}

fn ec(seed: u8) -> p256::ecdsa::SigningKey {
    p256::ecdsa::SigningKey::from_slice(&[seed; 32]).unwrap()
}

fn ed(seed: u8) -> ed25519_dalek::SigningKey {
    ed25519_dalek::SigningKey::from_bytes(&[seed; 32])
}

/// A config with these keys by name, with the globs of drivers that each may sign, and more of the section.
pub(super) fn trust(mode: &str, keys: &[(&str, Signer, &str)], more: &str) -> String {
    let mut text = format!("trust:\n  mode: {mode}\n");
    if !keys.is_empty() {
        text.push_str("  keys:\n");
    }
    for (name, signer, drivers) in keys {
        text.push_str(&format!("  - name: {name}\n    pem: |\n"));
        signer
            .pem()
            .lines()
            .for_each(|line| text.push_str(&format!("      {line}\n")));
        if !drivers.is_empty() {
            text.push_str(&format!("    drivers: {drivers}\n"));
        }
    }
    if !more.is_empty() {
        text.push_str(&format!("  {more}\n"));
    }
    text
}

/// Puts another config into the place of the daemon's.
pub(super) trait Configure {
    fn put_config(&self, text: &str);
}

impl Configure for Daemon {
    fn put_config(&self, text: &str) {
        let new = self.write("nodedock.yaml.new", text);
        std::fs::rename(new, self.path().join("nodedock.yaml")).unwrap();
    }
}

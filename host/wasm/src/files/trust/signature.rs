//! Reads `NAME.wasm.sig` in each of the formats that tools write.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

/// Bytes of the longest supported signature: one of ECDSA P-256 in DER has 72.
const SIGNATURE_BYTES_MAX: usize = 128;

/// Why a file is not a signature.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SignatureError {
    #[error("it is empty")]
    Empty,
    #[error("it is a bundle (JSON) that cannot be read: {0}")]
    Bundle(String),
    #[error("the bundle has no `messageSignature`, as `cosign sign-blob --bundle` writes it")]
    NoMessageSignature,
    #[error("the bundle's signature is not base64")]
    BundleBase64,
    #[error("{0} bytes that are no signature, neither base64 nor binary")]
    Unknown(usize),
}

/// A bundle of cosign, in Sigstore's format or cosign's former one. Certificates and log entries in it are ignored: keys are the operator's.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Bundle {
    message_signature: Option<MessageSignature>,
    base64_signature: Option<String>,
}

#[derive(Deserialize)]
struct MessageSignature {
    signature: String,
}

/// The signature itself, from a file's content.
pub(super) fn decode(content: &[u8]) -> Result<Vec<u8>, SignatureError> {
    let text = content.trim_ascii();
    match text.first() {
        None => Err(SignatureError::Empty),
        Some(b'{') => of_bundle(text),
        Some(_) => of_base64(text)
            .or_else(|| binary(content))
            .ok_or(SignatureError::Unknown(content.len())),
    }
}

/// `base64` breaks long lines, so blanks are ignored anywhere.
fn of_base64(text: &[u8]) -> Option<Vec<u8>> {
    let text: Vec<u8> = text
        .iter()
        .copied()
        .filter(|byte| !byte.is_ascii_whitespace())
        .collect();
    let decoded = STANDARD.decode(text).ok()?;
    (decoded.len() <= SIGNATURE_BYTES_MAX).then_some(decoded)
}

/// The bare bytes: 64 of Ed25519, or a DER sequence.
fn binary(content: &[u8]) -> Option<Vec<u8>> {
    let plausible = content.len() == 64 || content.first() == Some(&0x30);
    (plausible && content.len() <= SIGNATURE_BYTES_MAX).then(|| content.to_owned())
}

fn of_bundle(text: &[u8]) -> Result<Vec<u8>, SignatureError> {
    let bundle: Bundle =
        serde_json::from_slice(text).map_err(|error| SignatureError::Bundle(error.to_string()))?;
    let signature = bundle
        .message_signature
        .map(|message| message.signature)
        .or(bundle.base64_signature);
    let signature = signature.ok_or(SignatureError::NoMessageSignature)?;
    of_base64(signature.as_bytes()).ok_or(SignatureError::BundleBase64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signature_encodings_decode_equally() {
        let mut der = vec![0x30, 70];
        der.extend(0..70);
        let text = STANDARD.encode(&der);
        let (first, rest) = text.split_at(76);
        let forms = [
            text.clone().into_bytes(),
            format!("{text}\n").into_bytes(),
            format!("{first}\n{rest}\r\n").into_bytes(),
            der.clone(),
            format!(r#"{{"base64Signature": "{text}", "cert": ""}}"#).into_bytes(),
            format!(
                r#" {{"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json", "verificationMaterial": {{}},
                    "messageSignature": {{"messageDigest": {{}}, "signature": "{text}"}}}}"#
            )
            .into_bytes(),
        ];
        for form in forms {
            assert_eq!(
                decode(&form),
                Ok(der.clone()),
                "{}",
                String::from_utf8_lossy(&form)
            );
        }
        // Of 64 bytes any may be a signature, also one that begins with a blank.
        let raw = [b' '; 1].into_iter().chain(1..64).collect::<Vec<u8>>();
        assert_eq!(decode(&raw), Ok(raw.clone()));
    }

    #[test]
    fn invalid_signature_content_is_named() {
        assert_eq!(decode(b""), Err(SignatureError::Empty));
        assert_eq!(decode(b" \n"), Err(SignatureError::Empty));
        assert_eq!(
            decode(b"not a signature!"),
            Err(SignatureError::Unknown(16))
        );
        assert_eq!(decode(&[0x30; 4096]), Err(SignatureError::Unknown(4096)));
        let long = STANDARD.encode([7; 400]);
        assert_eq!(
            decode(long.as_bytes()),
            Err(SignatureError::Unknown(long.len()))
        );
        assert!(matches!(
            decode(b"{\"a\": "),
            Err(SignatureError::Bundle(_))
        ));
        assert_eq!(
            decode(b"{\"dsseEnvelope\": {}}"),
            Err(SignatureError::NoMessageSignature)
        );
        assert_eq!(
            decode(b"{\"base64Signature\": \"%\"}"),
            Err(SignatureError::BundleBase64)
        );
    }
}

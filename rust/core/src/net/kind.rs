//! The kinds of message. A kind names what a body holds, so that a reordered message is refused before it is parsed.

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $value:literal,)*) => {
        /// What a message holds.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u16)]
        pub enum Kind { $($(#[$doc])* $name = $value,)* }

        impl Kind {
            /// Every kind, for tests.
            pub const ALL: &'static [Kind] = &[$(Kind::$name,)*];

            /// The kind with this number.
            pub fn from_number(number: u16) -> Option<Kind> {
                match number { $($value => Some(Kind::$name),)* _ => None }
            }
        }
    };
}

kinds! {
    /// The first message of a session.
    Hello = 1,
    /// Both parties' confirmation of the transcript of the hello.
    Confirm = 2,
    /// A goodbye that ends a session in order.
    Goodbye = 3,
    /// Encryption keys: the public key and the rotation keys.
    Keys = 10,
    /// A seeded request ciphertext or several.
    Request = 11,
    /// An answer ciphertext or several.
    Answer = 12,
    /// A message of the base oblivious transfers.
    BaseOt = 20,
    /// A message of an oblivious transfer extension.
    OtExtension = 21,
    /// Corrections of random choices into real ones.
    Choices = 22,
    /// Masked messages of chosen transfers.
    Transfers = 23,
    /// Masked field elements that both parties open.
    Opening = 24,
    /// Masked bits that both parties open.
    BitOpening = 25,
    /// Marks of the stores of one-time correlations.
    StoreMarks = 26,
    /// Shares handed from one party to the other: an input or an opened output.
    Shares = 30,
    /// A public instruction from the client to the server: which step comes next.
    Command = 31,
}

"""Text that users might send, written for the measurements that `protect` makes when it is given none
(`--sample-text`).

Two halves: what users send, and what an attacker has read elsewhere to count words in.
"""

from __future__ import annotations

SENT = (
    "I lost my bank card on holiday and somebody has used it. What should I do first?",
    "My daughter has had a fever of 39 degrees since Tuesday evening. Should I take her to the doctor?",
    "Please draft a short letter to my landlord: the heating in flat 12 has been broken for two weeks.",
    "Can my employer dismiss me while I am on sick leave?",
    "Why was I charged twice for the same transfer last Friday?",
    "Summarise the meeting notes below for my manager, and leave out everything about the salary talks.",
    "What is the difference between a will and a living will, and do I need a lawyer for either of them?",
    "I have been feeling very low since my father died in March. What can I do to sleep better?",
    "Translate this message to my tax adviser into English, please.",
    "How much of my pension can I take out before I am 60 without paying extra tax?",
    "My account number has changed. How do I tell the people who pay me every month?",
    "Is it safe to take ibuprofen together with the tablets for my blood pressure?",
    "Write a reply to the customer whose order was sent to the wrong address in Leeds.",
    "I want to leave my husband and I do not know what happens to the house and the children.",
    "Which of these three offers for the factory roof is the best one, and what is missing in each?",
    "The transfer to my brother in Poland has not arrived. How long does it take?",
    "Explain the result of my blood test in simple words: the iron is low and the liver values are high.",
    "We plan to buy a small company next year. Which questions should we ask before we sign anything?",
    "I forgot the code of my card and the machine has kept it. Where can I get a new one?",
    "Please check this contract for clauses that let the supplier raise the price without telling us.",
)
READ_ELSEWHERE = (
    "The bank sent me a new card last week, and the machine has taken it. What should I do now?",
    "A doctor should look at a fever that has lasted for more than three days.",
    "The letter to the landlord must say what is broken and since when it has been broken.",
    "An employer can dismiss somebody who is ill, but the law sets limits to it.",
    "I was charged for a transfer that I did not make. How do I get my money back?",
    "The notes of the meeting are long. Please write down what matters to the customers.",
    "A lawyer can explain the difference between the two contracts and what happens to the house.",
    "Many people sleep badly after a death in the family, and it takes time before they feel better.",
    "How do I translate a message on my phone, and is it safe?",
    "You pay tax on your pension when you take it out of the account.",
    "Tell the people who pay you every month that your number has changed.",
    "Which tablets should not be taken together? Ask a doctor before you take any of them.",
    "The order was sent to another address. Please write to the customer and say that we are sorry.",
    "The children stay in the house until the court has decided what happens to it.",
    "We have three offers for the roof. The best of them is not the one with the lowest price.",
    "How long does a transfer to another country take, and what does it cost?",
    "The result of a blood test says how much iron there is in the blood.",
    "Before they signed, they asked for the numbers of the last three years.",
    "Where can I get the code of my card if I have forgotten it?",
    "This clause lets the supplier raise the price every year without asking us.",
)
